// The command line's parser as the subcommands see it: names, targets and texts of options. CLI11 does the work and is
// included in parser.cpp alone, because a file that sees its headers takes seconds longer to compile.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace dspattn::apps {

// One option of a command. Every setter returns the option, for the next one.
class Option {
 public:
  explicit Option(CLI::Option* option) : option_(option) {}
  Option& type_name(const std::string& text);  // what its help calls a value
  Option& required();
  Option& delimiter(char between);  // of the items of a list
  Option& capture_default_str();    // its help shows the value the target has now
  bool given() const;               // after parsing: whether the user gave it

 private:
  CLI::Option* option_;  // the parser's
};

// One subcommand.
class Command {
 public:
  explicit Command(CLI::App* app) : app_(app) {}
  // "--name" or, without dashes, a positional argument. The target must outlive parsing. T: the types parser.cpp lists.
  // An empty value is refused: the targets' own emptiness means that the option was not given.
  template <class T>
  Option add_option(const std::string& name, T& target, const std::string& text);
  Option add_flag(const std::string& name, bool& target, const std::string& text);
  Option get_option(const std::string& name) const;
  void footer(const std::string& text);
  // What the command does, once its options are parsed. The reasons of an Error it throws name options
  // (option_names.h).
  void callback(std::function<void()> action);
  // The same for reasons that the action prints itself.
  std::vector<std::string> with_option_names(const std::vector<std::string>& reasons) const;

 private:
  CLI::App* app_;  // the parser's
};

// The whole command line.
class Parser {
 public:
  Parser(const std::string& name, const std::string& version, const std::string& text, const std::string& footer);
  ~Parser();
  Parser(const Parser&) = delete;
  Parser& operator=(const Parser&) = delete;

  Command add_subcommand(const std::string& name, const std::string& text);
  std::vector<std::string> commands() const;
  // Parses and runs the command's action, whose exceptions pass through. False when the command line is wrong; the
  // reason has then been printed. Help counts as right.
  bool parse(int argc, char** argv);

 private:
  std::unique_ptr<CLI::App> app_;
};

}  // namespace dspattn::apps
