// Random calls of norm_rope, and what they must give: fp64 loops over the same inputs, with the roundings that the
// contract names.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "check/random.h"
#include "core/half.h"
#include "dspattn/norm_rope.h"

namespace dspattn {

struct NormRopeCase {
  DType dtype = DType::bf16;
  std::int64_t batch = 1, heads = 3, d = 64;
  std::vector<std::int64_t> tokens = {5};  // of each part
  bool norm = true, weight = true, rotation = true;
  RopePairs pairs = RopePairs::neighbours;
  std::int64_t apart = 0;  // elements between a token's heads and the next token's, and before the first

  std::string text() const {
    std::string text = std::string(name(dtype)) + " batch " + std::to_string(batch) + " heads " +
                       std::to_string(heads) + " d " + std::to_string(d) + " parts";
    for (const std::int64_t n : tokens) text += " " + std::to_string(n);
    text += norm ? weight ? " norm weight" : " norm" : "";
    text += rotation ? pairs == RopePairs::halves ? " halves" : " neighbours" : "";
    return text + " apart " + std::to_string(apart);
  }
};

// Tensors on the host, and a call of them. Outputs are slices of one joined sequence, between elements that must stay.
class NormRopeData {
 public:
  explicit NormRopeData(const NormRopeCase& of, std::uint64_t seed = 3) : case_(of) {
    check::Random random(seed, 1);
    const auto draw = [&](std::int64_t count, DType type) {
      std::vector<std::uint8_t> bytes(static_cast<std::size_t>(count) * size_bytes(type));
      for (std::int64_t i = 0; i < count; ++i) core::store_element(bytes.data(), type, i, random.bell());
      return bytes;
    };
    std::int64_t total = 0;
    for (const std::int64_t n : of.tokens) {
      x.push_back(draw(of.batch * n * row() + of.apart, of.dtype));
      weights.push_back(draw(of.d, of.dtype));
      total += n;
    }
    cos = draw(total * of.d, DType::f32);
    sin = draw(total * of.d, DType::f32);
    out = std::vector<std::uint8_t>(static_cast<std::size_t>(of.batch * total * row() + of.apart) * size(), 0x2A);
    tokens_ = total;
  }

  std::size_t size() const { return size_bytes(case_.dtype); }
  std::int64_t row() const { return case_.heads * case_.d + case_.apart; }  // elements of a token

  // A call of buffers that hold the same, here or on a device.
  NormRopeArgs args(const std::vector<const void*>& of_x, const std::vector<const void*>& of_weights,
                    const void* of_cos, const void* of_sin, void* of_out) const {
    NormRopeArgs a;
    std::int64_t first = 0;
    const auto at = [&](const void* base, std::int64_t token) {
      return static_cast<const std::uint8_t*>(base) + static_cast<std::size_t>(case_.apart + token * row()) * size();
    };
    for (std::size_t i = 0; i < case_.tokens.size(); ++i) {
      const std::int64_t n = case_.tokens[i];
      NormRopePart part;
      part.x = {at(of_x[i], 0), case_.dtype, {case_.batch, n, case_.heads, case_.d}, {n * row(), row(), case_.d, 1}};
      part.out = {const_cast<std::uint8_t*>(at(of_out, first)),
                  case_.dtype,
                  {case_.batch, n, case_.heads, case_.d},
                  {tokens_ * row(), row(), case_.d, 1}};
      if (case_.norm && case_.weight) part.weight = {of_weights[i], case_.dtype, {case_.d}};
      part.first_position = first;
      a.parts.push_back(part);
      first += n;
    }
    if (case_.norm) a.eps = 1e-3;
    if (case_.rotation) {
      a.cos = {of_cos, DType::f32, {tokens_, case_.d}};
      a.sin = {of_sin, DType::f32, {tokens_, case_.d}};
    }
    a.pairs = case_.pairs;
    return a;
  }
  NormRopeArgs args() {
    std::vector<const void*> of_x, of_weights;
    for (const auto& part : x) of_x.push_back(part.data());
    for (const auto& weight : weights) of_weights.push_back(weight.data());
    return args(of_x, of_weights, cos.data(), sin.data(), out.data());
  }

  // That `found`, a buffer like out, has the results and nothing else was written.
  void expect_right(const std::vector<std::uint8_t>& found) const {
    std::int64_t first = 0;
    std::vector<double> expected(static_cast<std::size_t>(case_.d)), allowed(expected);
    for (std::size_t part = 0; part < case_.tokens.size(); ++part) {
      const std::int64_t n = case_.tokens[part];
      for (std::int64_t i = 0; i < case_.batch * n * case_.heads; ++i) {
        const std::int64_t head = i % case_.heads, token = i / case_.heads % n, batch = i / case_.heads / n;
        find(part, case_.apart + (batch * n + token) * row() + head * case_.d, first + token, expected, allowed);
        const std::int64_t at = case_.apart + (batch * tokens_ + first + token) * row() + head * case_.d;
        for (std::int64_t c = 0; c < case_.d; ++c) {
          const double value = core::load_element(found.data(), case_.dtype, at + c);
          ASSERT_NEAR(value, expected[static_cast<std::size_t>(c)], allowed[static_cast<std::size_t>(c)])
              << case_.text() << ": part " << part << " batch " << batch << " token " << token << " head " << head
              << " column " << c;
        }
      }
      first += n;
    }
    for (std::int64_t i = 0; i < case_.batch * tokens_ * row() + case_.apart; ++i) {
      const bool between = i < case_.apart || (i - case_.apart) % row() >= case_.heads * case_.d;
      for (std::size_t byte = 0; between && byte < size(); ++byte) {
        ASSERT_EQ(found[static_cast<std::size_t>(i) * size() + byte], 0x2A) << case_.text() << ": written beside " << i;
      }
    }
  }

  std::vector<std::vector<std::uint8_t>> x, weights;
  std::vector<std::uint8_t> cos, sin, out;

 private:
  // One head's vector, in fp64 but for the rounding between norm and rotation; and what it may be off: half a unit of
  // the type, and where that rounding may fall to the other side a whole one of what it rounds.
  void find(std::size_t part, std::int64_t element, std::int64_t position, std::vector<double>& z,
            std::vector<double>& allowed) const {
    const auto d = static_cast<std::size_t>(case_.d);
    const double unit = core::epsilon_of(case_.dtype), fp32 = 4 * core::epsilon_of(DType::f32);
    std::vector<double> y(d), off(d);
    double sum = 0;
    for (std::size_t c = 0; c < d; ++c) {
      y[c] = core::load_element(x[part].data(), case_.dtype, element + static_cast<std::int64_t>(c));
      sum += y[c] * y[c];
    }
    for (std::size_t c = 0; c < d && case_.norm; ++c) {
      y[c] /= std::sqrt(sum / static_cast<double>(d) + 1e-3);
      if (case_.weight) y[c] *= core::load_element(weights[part].data(), case_.dtype, static_cast<std::int64_t>(c));
      off[c] = fp32 * std::abs(y[c]);
      if (case_.rotation && case_.dtype != DType::f32) {
        const double rounded = core::round_to(case_.dtype, y[c]);
        if (core::round_to(case_.dtype, y[c] - off[c]) != core::round_to(case_.dtype, y[c] + off[c])) {
          off[c] += unit * std::abs(y[c]);
        }
        y[c] = rounded;
      }
    }
    for (std::size_t c = 0; c < d; ++c) {
      z[c] = y[c];
      allowed[c] = off[c];
      if (case_.rotation) {
        const bool halves = case_.pairs == RopePairs::halves;
        const bool second = halves ? c >= d / 2 : c % 2 == 1;
        const std::size_t other = halves ? (c + d / 2) % d : c ^ 1;
        const auto angle = position * case_.d + static_cast<std::int64_t>(c);
        const double cosine = core::load_element(cos.data(), DType::f32, angle);
        const double sine = core::load_element(sin.data(), DType::f32, angle) * (second ? 1 : -1);
        z[c] = y[c] * cosine + y[other] * sine;
        allowed[c] = (off[c] + fp32 * std::abs(y[c])) * std::abs(cosine) +
                     (off[other] + fp32 * std::abs(y[other])) * std::abs(sine);
      }
      allowed[c] += case_.dtype == DType::f32 ? 0 : unit / 2 * std::abs(z[c]) + 1e-7;
    }
  }

  NormRopeCase case_;
  std::int64_t tokens_ = 0;
};

// Every type, pairing and kind of row; parts, batches, strides; dims that vectors divide and such that they do not.
inline std::vector<NormRopeCase> norm_rope_cases() {
  std::vector<NormRopeCase> cases;
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    for (const RopePairs pairs : {RopePairs::neighbours, RopePairs::halves}) {
      NormRopeCase one;
      one.dtype = dtype;
      one.pairs = pairs;
      cases.push_back(one);
      one.d = 128;
      one.heads = 9;  // more than a CTA's
      one.tokens = {3, 18};
      one.batch = 2;
      cases.push_back(one);
      one.apart = 16;
      one.weight = false;
      cases.push_back(one);
      one.apart = 3;  // rows that are not aligned
      cases.push_back(one);
      for (const std::int64_t d : {2, 6, 40, 96, 250, 256}) {
        NormRopeCase other;
        other.dtype = dtype;
        other.pairs = pairs;
        other.d = d;
        other.tokens = {4, 1, 0, 7};
        cases.push_back(other);
      }
    }
    for (const bool norm : {false, true}) {
      NormRopeCase alone;  // or neither: a copy
      alone.dtype = dtype;
      alone.norm = norm;
      alone.rotation = false;
      alone.tokens = {6, 2};
      cases.push_back(alone);
      alone.d = 7;
      cases.push_back(alone);
    }
    NormRopeCase turned;
    turned.dtype = dtype;
    turned.norm = false;
    cases.push_back(turned);
  }
  return cases;
}

}  // namespace dspattn
