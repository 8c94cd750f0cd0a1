// Every command once inside one process, by its right way and by an error: what a command takes it must give back, and
// one search for leaks at the end looks after all of them. What commands print is tested in tests/cli.
#include "apps/program.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "apps/npy.h"

namespace dspattn::apps {
namespace {

// Sends a stream elsewhere while it lives.
class Captured {
 public:
  explicit Captured(std::ostream& stream) : stream_(stream), before_(stream.rdbuf(text_.rdbuf())) {}
  ~Captured() { stream_.rdbuf(before_); }
  Captured(const Captured&) = delete;
  Captured& operator=(const Captured&) = delete;
  std::string text() const { return text_.str(); }

 private:
  std::ostringstream text_;
  std::ostream& stream_;
  std::streambuf* before_;
};

struct Result {
  int code;
  std::string out, error;
};

Result run(std::vector<std::string> words) {
  words.insert(words.begin(), "dspattn");
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  const Captured out(std::cout), error(std::cerr);
  const int code = run_program(static_cast<int>(words.size()), pointers.data());
  return {code, out.text(), error.text()};
}

class Program : public ::testing::Test {
 protected:
  Program()
      : folder_(std::filesystem::path(::testing::TempDir()) / ("dspattn_program_test_" + std::to_string(getpid()))) {
    std::filesystem::create_directories(folder_);
  }
  ~Program() override { std::filesystem::remove_all(folder_); }
  std::string file(const std::string& name) const { return (folder_ / name).string(); }

  std::string written(const std::string& name, DType dtype, const std::vector<std::int64_t>& shape) const {
    std::size_t bytes = size_bytes(dtype);
    for (const std::int64_t extent : shape) bytes *= static_cast<std::size_t>(extent);
    std::ofstream stream(file(name), std::ios::binary);
    write_npy(stream, {dtype, shape, std::vector<std::byte>(bytes, std::byte{dtype == DType::b8})});
    return file(name);
  }

 private:
  std::filesystem::path folder_;
};

TEST_F(Program, Help) {
  EXPECT_EQ(run({"--help"}).code, 0);
  EXPECT_EQ(run({"--version"}).code, 0);
  EXPECT_EQ(run({"imaginary"}).code, 2);
}

TEST_F(Program, Info) {
  EXPECT_NE(run({"info", "--json"}).out.find("\"version\""), std::string::npos);
  EXPECT_EQ(run({"info", "--imaginary"}).code, 2);
}

TEST_F(Program, Kernels) {
  EXPECT_NE(run({"kernels", "--n", "64", "--all"}).out.find("cpu_"), std::string::npos);
  EXPECT_EQ(run({"kernels", "--pattern", "3:2"}).code, 2);
}

TEST_F(Program, Verify) {
  EXPECT_EQ(run({"verify", "--seed", "1", "--count", "3", "--max-n", "20"}).code, 0);
  EXPECT_EQ(run({"verify", "--kernel", "imaginary"}).code, 2);
}

TEST_F(Program, Bench) {
  const std::vector<std::string> brief{"bench", "--n", "16", "--pattern", "dense", "--seconds", "0.001", "--json"};
  const auto to = [&](const std::string& place) {
    std::vector<std::string> words = brief;
    words.push_back(place);
    return run(words);
  };
  EXPECT_EQ(to(file("times.json")).code, 0);
  EXPECT_TRUE(std::filesystem::exists(file("times.json")));
  EXPECT_EQ(to(file("no/such/folder.json")).code, 2);
}

TEST_F(Program, Run) {
  const std::string q = written("q.npy", DType::f32, {2, 2, 10, 8}), kv = written("kv.npy", DType::f16, {2, 2, 12, 8});
  const std::string k = written("k.npy", DType::f32, {2, 2, 12, 8}),
                    mask = written("mask.npy", DType::b8, {1, 1, 1, 12});
  const Result right = run({"run", q, k, k, "--mask", mask, "--out", file("o.npy"), "--lse", file("lse.npy")});
  EXPECT_EQ(right.code, 0) << right.error;
  EXPECT_EQ(read_npy(file("o.npy")).shape, (std::vector<std::int64_t>{2, 2, 10, 8}));
  EXPECT_EQ(run({"run", q, kv, k, "--out", file("p.npy")}).code, 2);  // of two types
  EXPECT_EQ(run({"run", q, file("missing.npy"), k, "--out", file("p.npy")}).code, 2);
  EXPECT_FALSE(std::filesystem::exists(file("p.npy")));
}

TEST_F(Program, Theory) {
  EXPECT_NE(run({"theory", "--section", "speed", "--json", "-"}).out.find("\"rows\""), std::string::npos);
  EXPECT_EQ(run({"theory", "--p", "0"}).code, 2);
}

}  // namespace
}  // namespace dspattn::apps
