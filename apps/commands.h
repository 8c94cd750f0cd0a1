// The subcommands of the program. Each register function adds one to the parser; its callback does the work, prints to
// standard output and sets the outcome. To add a subcommand: one file, one line here, one line in program.cpp.
#pragma once

#include <string>

namespace dspattn::apps {

class Parser;

// Exit codes of the program.
enum class Exit : int {
  ok = 0,
  check_failed = 1,  // the program did its work, and a result was wrong
  bad_input = 2,     // an option, a file or a problem it cannot take; the message says all reasons
  broken = 3,        // anything else: out of memory, a result that could not be written
};

struct Outcome {
  Exit exit = Exit::ok;
  std::string command_line;  // as the user gave it, for results that say how they were made
};

void register_bench(Parser& parser, Outcome& outcome);
void register_info(Parser& parser, Outcome& outcome);
void register_kernels(Parser& parser, Outcome& outcome);
void register_run(Parser& parser, Outcome& outcome);
void register_theory(Parser& parser, Outcome& outcome);
void register_verify(Parser& parser, Outcome& outcome);

}  // namespace dspattn::apps
