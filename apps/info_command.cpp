// dspattn info: what this build and this machine offer.
#include <hwy/targets.h>

#include <CLI/App.hpp>
#include <bit>
#include <cstdint>
#include <fstream>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "apps/commands.h"
#include "dspattn/kernels.h"

namespace dspattn::apps {
namespace {

// Instruction sets this processor has among those Highway knows, best first (lower bits are better).
std::vector<std::string> cpu_targets() {
  std::vector<std::string> names;
  std::uint64_t left = static_cast<std::uint64_t>(hwy::SupportedTargets());
  while (left != 0) {
    const std::uint64_t lowest = left & (~left + 1);
    names.emplace_back(hwy::TargetName(static_cast<std::int64_t>(lowest)));
    left &= left - 1;
  }
  return names;
}

std::string cpu_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    for (const char* key : {"model name", "CPU part"}) {
      const std::size_t colon = line.find(": ");
      if (line.starts_with(key) && colon != std::string::npos) {
        return (key[0] == 'C' ? "ARM part " : "") + line.substr(colon + 2);
      }
    }
  }
  return "unknown";
}

nlohmann::ordered_json describe() {
  const std::string cuda_compiler = DSPATTN_CUDA_COMPILER;
  nlohmann::ordered_json all;
  all["version"] = DSPATTN_VERSION;
  all["compiler"] = DSPATTN_COMPILER;
  all["build"] = DSPATTN_BUILD_TYPE;
  all["cuda"] = cuda_compiler.empty() ? nlohmann::ordered_json(nullptr) : nlohmann::ordered_json(cuda_compiler);
  all["cpu"] = {{"name", cpu_name()}, {"threads", std::thread::hardware_concurrency()}, {"targets", cpu_targets()}};
  all["kernels"] = {{"forward", kernels(Pass::forward).size()}, {"backward", kernels(Pass::backward).size()}};
  return all;
}

std::string joined(const nlohmann::ordered_json& words) {
  std::string text;
  for (const auto& word : words) text += (text.empty() ? "" : ", ") + word.get<std::string>();
  return text;
}

void print(const nlohmann::ordered_json& all) {
  std::cout << "dspattn " << all["version"].get<std::string>() << ", " << all["compiler"].get<std::string>() << ", "
            << all["build"].get<std::string>() << " build\n";
  std::cout << "GPU kernels   "
            << (all["cuda"].is_null() ? "not in this build: no nvcc was found"
                                      : "compiled with nvcc " + all["cuda"].get<std::string>())
            << "\n";
  std::cout << "CPU           " << all["cpu"]["name"].get<std::string>() << ", " << all["cpu"]["threads"]
            << " threads\n";
  std::cout << "Instructions  " << joined(all["cpu"]["targets"]) << "\n";
  std::cout << "Kernel table  " << all["kernels"]["forward"] << " forward, " << all["kernels"]["backward"]
            << " backward (dspattn kernels lists them)\n";
}

}  // namespace

void register_info(CLI::App& app, Outcome&) {
  CLI::App* command = app.add_subcommand("info", "What this build and this machine offer: CPU features, GPUs, kernels");
  auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "print JSON instead of text");
  command->callback([json] {
    const nlohmann::ordered_json all = describe();
    if (*json) {
      std::cout << all.dump(2) << "\n";
    } else {
      print(all);
    }
  });
}

}  // namespace dspattn::apps
