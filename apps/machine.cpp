#include "apps/machine.h"

#include <hwy/targets.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <fstream>
#include <thread>

#include "api/device_memory.h"
#include "revision.h"

namespace dspattn::apps {

BuildFacts build_facts() {
  return {DSPATTN_VERSION, DSPATTN_REVISION, DSPATTN_COMPILER, DSPATTN_BUILD_TYPE, DSPATTN_CUDA_COMPILER};
}

std::string cpu_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    const std::size_t colon = line.find(": ");
    if (colon == std::string::npos) continue;
    if (line.starts_with("model name")) return line.substr(colon + 2);
    if (line.starts_with("CPU part")) return "ARM part " + line.substr(colon + 2);
  }
  return "unknown";
}

int cpu_threads() { return std::max(1, static_cast<int>(std::thread::hardware_concurrency())); }

double memory_bytes() {
  return static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
}

std::vector<std::string> cpu_instruction_sets() {
  std::vector<std::string> names;
  // Highway numbers its targets so that a lower bit is a better one; the last are plain C++ for any processor.
  auto left =
      static_cast<std::uint64_t>(hwy::SupportedTargets()) & ~static_cast<std::uint64_t>(HWY_EMU128 | HWY_SCALAR);
  for (; left != 0; left &= left - 1) {
    names.emplace_back(hwy::TargetName(static_cast<std::int64_t>(left & (~left + 1))));
  }
  if (names.empty()) names.emplace_back("none beyond plain C++");
  return names;
}

std::string device_name(Device device) {
  if (device.type == DeviceType::cpu) return cpu_name();
  const std::vector<std::string> gpus = api::gpu_names();
  return static_cast<std::size_t>(device.index) < gpus.size() ? gpus[static_cast<std::size_t>(device.index)] : "none";
}

std::string now() {
  const std::time_t seconds = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  std::tm parts{};
  gmtime_r(&seconds, &parts);
  char text[sizeof "2000-01-01T00:00:00Z"];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

}  // namespace dspattn::apps
