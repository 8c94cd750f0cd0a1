// What this build is and what it runs on.
#pragma once

#include <string>
#include <vector>

#include "dspattn/attention.h"

namespace dspattn::apps {

struct BuildFacts {
  std::string version;
  std::string revision;  // git's, with -dirty when the tree was not clean; "unknown" outside a repository
  std::string compiler;
  std::string build_type;
  std::string cuda;  // version of nvcc; empty when the build has no GPU kernels
};

BuildFacts build_facts();

std::string cpu_name();
int cpu_threads();
// Of this machine, whatever of it is in use.
double memory_bytes();
// Instruction sets of this processor that the CPU kernels may use, best first.
std::vector<std::string> cpu_instruction_sets();
std::string device_name(Device device);
// UTC, ISO 8601.
std::string now();

}  // namespace dspattn::apps
