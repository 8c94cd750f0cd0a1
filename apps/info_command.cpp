// dspattn info: what this build and this machine offer.
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "api/device_memory.h"
#include "apps/commands.h"
#include "apps/machine.h"
#include "apps/parser.h"
#include "dspattn/kernels.h"

namespace dspattn::apps {
namespace {

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

void print_json(const BuildFacts& build) {
  nlohmann::ordered_json all;
  all["version"] = build.version;
  all["revision"] = build.revision;
  all["compiler"] = build.compiler;
  all["build"] = build.build_type;
  if (!build.cuda.empty()) all["cuda"] = build.cuda;
  all["cpu"] = {{"name", cpu_name()}, {"threads", cpu_threads()}, {"instruction_sets", cpu_instruction_sets()}};
  all["gpus"] = api::gpu_names();
  all["kernels"] = {{"forward", kernels(Pass::forward).size()}, {"backward", kernels(Pass::backward).size()}};
  std::cout << all.dump(2) << "\n";
}

void print_text(const BuildFacts& build) {
  const std::vector<std::string> gpus = api::gpu_names();
  std::cout << "dspattn " << build.version << " (" << build.revision << ")\n"
            << "Build         " << build.compiler << ", " << build.build_type << ", "
            << (build.cuda.empty() ? "no GPU kernels: no nvcc was found" : "GPU kernels by nvcc " + build.cuda) << "\n"
            << "CPU           " << cpu_name() << ", " << cpu_threads() << " threads\n"
            << "Instructions  " << joined(cpu_instruction_sets()) << "\n"
            << "GPUs          " << (gpus.empty() ? "none" : joined(gpus)) << "\n"
            << "Kernel table  " << kernels(Pass::forward).size() << " forward, " << kernels(Pass::backward).size()
            << " backward (dspattn kernels lists them)\n";
}

}  // namespace

void register_info(Parser& parser, Outcome&) {
  Command command =
      parser.add_subcommand("info", "What this build and this machine offer: CPU features, GPUs, kernels");
  auto json = std::make_shared<bool>(false);
  command.add_flag("--json", *json, "print JSON instead of text");
  command.callback([json] { *json ? print_json(build_facts()) : print_text(build_facts()); });
}

}  // namespace dspattn::apps
