#include "dspattn/error.h"

#include <utility>

namespace dspattn {
namespace {

std::string join(const std::vector<std::string>& reasons) {
  std::string text;
  for (const std::string& reason : reasons) {
    if (!text.empty()) text += "\n";
    text += reason;
  }
  return text;
}

}  // namespace

Error::Error(std::vector<std::string> reasons) : std::runtime_error(join(reasons)), reasons_(std::move(reasons)) {}

std::string Status::message() const { return join(reasons); }

}  // namespace dspattn
