#include "apps/program.h"

#include <exception>
#include <iostream>
#include <new>
#include <stdexcept>
#include <string>

#include "apps/commands.h"
#include "apps/machine.h"
#include "apps/parser.h"
#include "dspattn/error.h"

namespace {

using dspattn::apps::Exit;
using dspattn::apps::Parser;

constexpr const char* kFooter = R"(
Start here:
  dspattn info                                   what this build and this machine offer
  dspattn verify --count 200                     check every kernel against a plain fp64 computation
  dspattn bench --n 1024 --d 64                  time the patterns side by side
  dspattn run q.npy k.npy v.npy --out o.npy      attention of your own arrays
Each command has its own help: dspattn bench --help

Exit codes: 0 all is well; 1 a check found a wrong result; 2 bad usage or input; 3 the program itself failed.)";

int code(Exit exit) { return static_cast<int>(exit); }

// The parser alone would say only that a command is missing.
void refuse_unknown_command(const Parser& parser, int argc, char** argv) {
  if (argc < 2 || argv[1][0] == '-') return;
  std::string names;
  for (const std::string& name : parser.commands()) {
    if (name == argv[1]) return;
    names += (names.empty() ? "" : ", ") + name;
  }
  throw dspattn::Error("command: expected one of " + names + ", got \"" + argv[1] + "\"");
}

int run(int argc, char** argv) {
  const dspattn::apps::BuildFacts build = dspattn::apps::build_facts();
  Parser parser(
      "dspattn", "dspattn " + build.version + " (" + build.revision + ")",
      "Attention whose scores are pruned on the fly to N:M structured sparsity: of every M keys a query sees,\n"
      "only the N with the largest scores take part.",
      kFooter);
  dspattn::apps::Outcome outcome;
  outcome.command_line = "dspattn";
  for (int i = 1; i < argc; ++i) outcome.command_line += std::string(" ") + argv[i];
  dspattn::apps::register_info(parser, outcome);
  dspattn::apps::register_kernels(parser, outcome);
  dspattn::apps::register_verify(parser, outcome);
  dspattn::apps::register_bench(parser, outcome);
  dspattn::apps::register_run(parser, outcome);
  dspattn::apps::register_theory(parser, outcome);

  refuse_unknown_command(parser, argc, argv);
  const bool parsed = parser.parse(argc, argv);
  if (!std::cout.flush()) throw std::runtime_error("standard output could not be written in full");
  return code(parsed ? outcome.exit : Exit::bad_input);
}

}  // namespace

namespace dspattn::apps {

int run_program(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const dspattn::Error& error) {
    for (const std::string& reason : error.reasons()) std::cerr << "dspattn: " << reason << "\n";
    return code(Exit::bad_input);
  } catch (const std::bad_alloc&) {
    std::cerr << "dspattn: out of memory\n";
    return code(Exit::broken);
  } catch (const std::exception& error) {
    std::cerr << "dspattn: " << error.what() << "\n";
    return code(Exit::broken);
  }
}

}  // namespace dspattn::apps
