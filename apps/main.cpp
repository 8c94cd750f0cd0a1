// dspattn: the command line of the library.
#include "apps/program.h"

int main(int argc, char** argv) { return dspattn::apps::run_program(argc, argv); }
