// The command line of the library: what main does, so that tests can call it.
#pragma once

namespace dspattn::apps {

// Runs one command; the program's exit code (commands.h). Errors are printed to standard error.
int run_program(int argc, char** argv);

}  // namespace dspattn::apps
