#include "apps/parser.h"

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <cctype>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "apps/option_names.h"
#include "dspattn/error.h"

namespace dspattn::apps {

Option& Option::type_name(const std::string& text) {
  option_->type_name(text);
  return *this;
}

Option& Option::required() {
  option_->required();
  return *this;
}

Option& Option::delimiter(char between) {
  option_->delimiter(between);
  return *this;
}

Option& Option::capture_default_str() {
  option_->capture_default_str();
  return *this;
}

bool Option::given() const { return option_->count() > 0; }

namespace {

enum class Kind { text, integer, number };

// What CLI11 would make of a value: it takes the nearest number of 64 bits for one that has more, the largest for -1
// where none is negative, and an integer with a zero in front as an octal one; of what is no number it does not say
// what is.
std::string why_not(const std::string& value, Kind kind, bool is_signed, std::size_t bytes) {
  if (value.empty()) return "expected a value, got \"\"";
  if (kind == Kind::text) return "";
  char* end = nullptr;
  if (kind == Kind::number) {
    static_cast<void>(std::strtod(value.c_str(), &end));
    return *end == '\0' ? "" : "expected a number, got \"" + value + "\"";
  }
  const std::size_t sign = value.front() == '-' || value.front() == '+' ? 1 : 0;
  if (value.size() > sign + 1 && value[sign] == '0' && std::isdigit(static_cast<unsigned char>(value[sign + 1])) != 0) {
    return "expected an integer without zeros in front, got " + value;
  }
  if (!is_signed && value.front() == '-') return "expected 0 or more, got " + value;
  errno = 0;
  long long number = 0;
  if (is_signed) {
    number = std::strtoll(value.c_str(), &end, 0);
  } else {
    static_cast<void>(std::strtoull(value.c_str(), &end, 0));
  }
  if (*end != '\0') return "expected an integer, got \"" + value + "\"";
  const bool fits = bytes >= sizeof(number) || number == static_cast<std::int32_t>(number);
  if (errno != ERANGE && fits) return "";
  return "expected an integer of " + std::to_string(8 * bytes) + " bits, got " + value;
}

template <class T>
struct Element {
  using type = T;
};
template <class T>
struct Element<std::optional<T>> {
  using type = T;
};
template <class T>
struct Element<std::vector<T>> {
  using type = T;
};

}  // namespace

template <class T>
Option Command::add_option(const std::string& name, T& target, const std::string& text) {
  CLI::Option* option = app_->add_option(name, target, text);
  using Number = typename Element<T>::type;
  constexpr Kind kind = std::is_integral_v<Number>         ? Kind::integer
                        : std::is_floating_point_v<Number> ? Kind::number
                                                           : Kind::text;
  option->check(
      [](const std::string& value) { return why_not(value, kind, std::is_signed_v<Number>, sizeof(Number)); });
  return Option(option);
}

template Option Command::add_option(const std::string&, std::string&, const std::string&);
template Option Command::add_option(const std::string&, int&, const std::string&);
template Option Command::add_option(const std::string&, std::int64_t&, const std::string&);
template Option Command::add_option(const std::string&, std::uint64_t&, const std::string&);
template Option Command::add_option(const std::string&, double&, const std::string&);
template Option Command::add_option(const std::string&, std::optional<std::int64_t>&, const std::string&);
template Option Command::add_option(const std::string&, std::optional<std::uint64_t>&, const std::string&);
template Option Command::add_option(const std::string&, std::optional<double>&, const std::string&);
template Option Command::add_option(const std::string&, std::vector<std::string>&, const std::string&);
template Option Command::add_option(const std::string&, std::vector<std::int64_t>&, const std::string&);
template Option Command::add_option(const std::string&, std::vector<double>&, const std::string&);

Option Command::add_flag(const std::string& name, bool& target, const std::string& text) {
  return Option(app_->add_flag(name, target, text));
}

Option Command::get_option(const std::string& name) const { return Option(app_->get_option(name)); }

void Command::footer(const std::string& text) { app_->footer(text); }

void Command::callback(std::function<void()> action) {
  app_->callback([command = *this, action = std::move(action)] {
    try {
      action();
    } catch (const Error& error) {
      throw Error(command.with_option_names(error.reasons()));
    }
  });
}

std::vector<std::string> Command::with_option_names(const std::vector<std::string>& reasons) const {
  return apps::with_option_names(reasons, [app = app_](const std::string& name) {
    const CLI::Option* option = app->get_option_no_throw(name);
    return option == nullptr ? Known::no : option->count() > 0 ? Known::given : Known::optional;
  });
}

Parser::Parser(const std::string& name, const std::string& version, const std::string& text, const std::string& footer)
    : app_(std::make_unique<CLI::App>(text, name)) {
  app_->set_version_flag("--version", version, "the version of this program, and the revision it was built from");
  app_->footer(footer);
  app_->require_subcommand(1);
  app_->get_formatter()->column_width(34);
}

Parser::~Parser() = default;

Command Parser::add_subcommand(const std::string& name, const std::string& text) {
  return Command(app_->add_subcommand(name, text));
}

std::vector<std::string> Parser::commands() const {
  std::vector<std::string> names;
  for (const CLI::App* command : app_->get_subcommands([](CLI::App*) { return true; })) {
    names.push_back(command->get_name());
  }
  return names;
}

bool Parser::parse(int argc, char** argv) {
  try {
    app_->parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app_->exit(error) == 0;
  }
  return true;
}

}  // namespace dspattn::apps
