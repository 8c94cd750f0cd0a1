#include "apps/output_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "dspattn/error.h"

namespace dspattn::apps {
namespace {

namespace fs = std::filesystem;

// Behind symbolic links.
fs::path place_of(const fs::path& path) {
  std::error_code problem;
  const fs::path place = fs::weakly_canonical(path, problem);
  return problem ? path : place;
}

// Names that nothing has yet are taken: what stands beside the file is somebody's, be it of another run.
std::string name_beside(const fs::path& place, int number) {
  return place.string() + ".partial" + (number == 0 ? "" : std::to_string(number));
}

std::string last_error() { return std::generic_category().message(errno); }

}  // namespace

OutputFile::OutputFile(std::string option, const std::string& path) : option_(std::move(option)), name_(path) {
  if (is_standard_output()) return;
  place_ = place_of(name_);
  const auto refuse = [&](const std::string& why) {
    throw Error(option_ + ": expected a file that can be written, got \"" + name_ + "\": " + why);
  };
  std::error_code problem;
  const fs::file_status status = fs::status(place_, problem);
  if (fs::is_directory(status)) refuse("it is a folder");
  if (fs::exists(status) && access(place_.c_str(), W_OK) != 0) refuse(last_error());
  // A device or a pipe takes its bytes as they come; what stands there must not be replaced, nor opened to try.
  if (fs::exists(status) && !fs::is_regular_file(status)) return;
  replaces_ = true;
  if (!make_beside()) refuse(last_error());
  discard();  // a run that is ended before it writes leaves nothing
}

bool OutputFile::make_beside() { return make_nameless() || make_named(); }

bool OutputFile::make_named() {
  for (int number = 0;; ++number) {
    const std::string name = name_beside(place_, number);
    const int made = open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (made >= 0) {
      close(made);
      beside_ = name;
      return true;
    }
    if (errno != EEXIST) return false;
    if (!told_)
      std::cerr << "dspattn: " << option_ << ": " << fs::path(name).filename().string()
                << " stays, perhaps of a run that was killed\n";
    told_ = true;
  }
}

bool OutputFile::make_nameless() {
#if defined(O_TMPFILE)
  const fs::path folder = place_.has_parent_path() ? place_.parent_path() : fs::path(".");
  nameless_ = open(folder.c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, 0666);
  if (nameless_ < 0) return false;
  beside_ = "/proc/self/fd/" + std::to_string(nameless_);
  if (access(beside_.c_str(), W_OK) == 0) return true;
  discard();  // there is no /proc, by which alone it gets a name
#endif
  return false;
}

// The nameless file takes its place where nothing is there, or else a name beside it.
void OutputFile::give_name() {
  const auto link = [this](const std::string& name) {
    return linkat(AT_FDCWD, beside_.c_str(), AT_FDCWD, name.c_str(), AT_SYMLINK_FOLLOW) == 0;
  };
  std::string name = place_;
  bool linked = link(name);
  for (int number = 0; !linked && errno == EEXIST; ++number) linked = link(name = name_beside(place_, number));
  const int nameless = std::exchange(nameless_, -1);
  if (linked) {
    beside_ = name;
  } else {
    // A file system that makes files without a name and gives them none.
    const fs::path from = std::exchange(beside_, {});
    std::error_code problem;
    linked = make_named() && fs::copy_file(from, beside_, fs::copy_options::overwrite_existing, problem);
    if (problem) errno = problem.value();
  }
  const std::string why = last_error();
  close(nameless);
  if (!linked) throw std::runtime_error(option_ + ": " + name_ + ": cannot be replaced: " + why);
}

void OutputFile::discard() {
  if (nameless_ >= 0) {
    close(std::exchange(nameless_, -1));
  } else if (!beside_.empty()) {
    std::error_code ignored;
    fs::remove(beside_, ignored);
  }
  beside_.clear();
}

OutputFile::OutputFile(OutputFile&& other) noexcept
    : option_(std::move(other.option_)),
      name_(std::move(other.name_)),
      place_(std::move(other.place_)),
      replaces_(other.replaces_),
      told_(other.told_),
      nameless_(std::exchange(other.nameless_, -1)),
      beside_(std::exchange(other.beside_, {})) {}

OutputFile::~OutputFile() { discard(); }

void OutputFile::write(const std::function<void(std::ostream&)>& content) {
  if (is_standard_output()) {
    content(std::cout);
    if (!std::cout.flush()) throw std::runtime_error(option_ + ": standard output could not be written in full");
    return;
  }
  const bool made = !replaces_ || !beside_.empty() || make_beside();
  std::ofstream stream;
  if (made) stream.open(replaces_ ? beside_ : place_, std::ios::binary | std::ios::trunc);
  if (!made || !stream)
    throw std::runtime_error(option_ + ": " + name_ + ": cannot be opened for writing: " + last_error());
  if (replaces_) keep_permissions();
  content(stream);
  stream.close();
  if (!stream) throw std::runtime_error(option_ + ": " + name_ + ": could not be written in full; is the disk full?");
}

// What stands there keeps its readers: a file that only its owner may read is replaced by such a one.
void OutputFile::keep_permissions() {
  std::error_code ignored;
  const fs::file_status there = fs::status(place_, ignored);
  if (fs::exists(there)) fs::permissions(beside_, there.permissions(), ignored);
}

void OutputFile::take_place() {
  if (beside_.empty()) return;
  if (nameless_ >= 0) give_name();
  std::error_code problem;
  if (beside_ != place_) fs::rename(beside_, place_, problem);
  if (problem) throw std::runtime_error(option_ + ": " + name_ + ": cannot be replaced: " + problem.message());
  beside_.clear();
}

}  // namespace dspattn::apps
