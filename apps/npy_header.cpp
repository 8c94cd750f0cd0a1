#include "apps/npy_header.h"

#include <charconv>
#include <optional>

#include "dspattn/error.h"

namespace dspattn::apps {
namespace {

// Walks over the text; every take_ function skips leading blanks and throws when it does not find what it takes.
class Reader {
 public:
  Reader(std::string_view text, const std::string& name) : left_(text), name_(name) {}

  [[noreturn]] void fail(const std::string& expected) const {
    throw Error(name_ + ": damaged .npy header: expected " + expected + ", got " +
                (left_.empty() ? std::string("its end") : "\"" + std::string(left_.substr(0, 20)) + "\""));
  }

  void skip_blanks() {
    while (!left_.empty() && (left_[0] == ' ' || left_[0] == '\n' || left_[0] == '\t')) left_.remove_prefix(1);
  }

  bool take_if(std::string_view token) {
    skip_blanks();
    if (!left_.starts_with(token)) return false;
    left_.remove_prefix(token.size());
    return true;
  }

  void take(std::string_view token) {
    if (!take_if(token)) fail("\"" + std::string(token) + "\"");
  }

  std::string take_string() {
    skip_blanks();
    if (left_.empty() || (left_[0] != '\'' && left_[0] != '"')) fail("a quoted word");
    const std::size_t end = left_.find(left_[0], 1);
    if (end == std::string_view::npos) fail("a closing quote");
    std::string word(left_.substr(1, end - 1));
    left_.remove_prefix(end + 1);
    return word;
  }

  bool take_bool() {
    if (take_if("True")) return true;
    if (take_if("False")) return false;
    fail("True or False");
  }

  std::int64_t take_extent() {
    skip_blanks();
    std::int64_t value = 0;
    const auto [end, code] = std::from_chars(left_.data(), left_.data() + left_.size(), value);
    if (code != std::errc{} || value < 0) fail("a length that is not negative");
    left_.remove_prefix(static_cast<std::size_t>(end - left_.data()));
    take_if("L");  // Python 2 wrote long integers so
    return value;
  }

  std::vector<std::int64_t> take_shape() {
    constexpr std::size_t kMostExtents = 32;  // NumPy's own limit for a long time; the caller takes fewer
    std::vector<std::int64_t> shape;
    take("(");
    while (!take_if(")")) {
      if (shape.size() == kMostExtents) fail("at most 32 extents");
      shape.push_back(take_extent());
      if (!take_if(",")) {
        take(")");
        break;
      }
    }
    return shape;
  }

  bool at_end() {
    skip_blanks();
    return left_.empty();
  }

 private:
  std::string_view left_;
  const std::string& name_;
};

}  // namespace

NpyHeader parse_npy_header(std::string_view text, const std::string& name) {
  Reader reader(text, name);
  std::optional<std::string> descr;
  std::optional<bool> fortran_order;
  std::optional<std::vector<std::int64_t>> shape;

  reader.take("{");
  while (!reader.take_if("}")) {
    const std::string key = reader.take_string();
    reader.take(":");
    if (key == "descr" && !descr) {
      if (reader.take_if("[")) throw Error(name + ": type: expected plain numbers, got a structured type");
      descr = reader.take_string();
    } else if (key == "fortran_order" && !fortran_order) {
      fortran_order = reader.take_bool();
    } else if (key == "shape" && !shape) {
      shape = reader.take_shape();
    } else {
      throw Error(name + ": damaged .npy header: expected descr, fortran_order and shape once each, got \"" +
                  key.substr(0, 20) + "\"");
    }
    if (!reader.take_if(",")) {
      reader.take("}");
      break;
    }
  }
  if (!reader.at_end()) reader.fail("nothing after the dictionary");
  if (!descr || !fortran_order || !shape) {
    throw Error(name + ": damaged .npy header: expected descr, fortran_order and shape, got " +
                (descr ? "" : "no descr ") + (fortran_order ? "" : "no fortran_order ") + (shape ? "" : "no shape"));
  }
  return {*descr, *fortran_order, *shape};
}

}  // namespace dspattn::apps
