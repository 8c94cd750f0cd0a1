// Errors name arguments of the library ("mask.allowed.dtype: expected bool, ..."); the user of the program gave
// options.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace dspattn::apps {

// What a command knows of an option by its name, "--mask".
enum class Known : std::uint8_t { no, optional, given };
using LookUp = std::function<Known(const std::string& option)>;

// The reasons with each argument that a sentence begins with replaced by the option it was given as, where the command
// has one (the one given, where there are two): "--mask dtype: expected bool, ...". A refusal of a kernel has a
// sentence for each of its reasons.
std::vector<std::string> with_option_names(const std::vector<std::string>& reasons, const LookUp& look_up);

}  // namespace dspattn::apps
