// Checks of a single tensor view, and of two views for overlap. Each adds its reasons to a report.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "dspattn/tensor_view.h"

namespace dspattn::core {

// Every call is checked: names travel as views, and text is put together only for what is refused.
struct Report {
  std::vector<std::string> reasons;

  void add(std::string_view argument, std::string_view expected, std::string_view given) {
    reasons.push_back(std::string(argument) + ": expected " + std::string(expected) + ", got " + std::string(given));
  }
};

// A view that the caller may leave out: given when it has a rank or points somewhere.
inline bool given(const ConstTensorView& view) { return view.present() || view.data != nullptr; }

// Whether the last dimension must be contiguous.
enum class Inner { contiguous, any };

// Rank, extents, strides, size, data and its alignment of a tensor that is read. Returns whether rank and extents can
// be used by further checks.
bool check_input(Report& report, std::string_view argument, const ConstTensorView& view, const char* layout, int rank,
                 Inner inner);

// The same for one that is written: every element must have a place of its own.
bool check_output(Report& report, std::string_view argument, const ConstTensorView& view, const char* layout, int rank,
                  Inner inner);

// That an output shares no memory with another tensor. Views that interleave without touching (d_q, d_k and d_v in one
// buffer) are told apart when they have the same strides. Both must have passed check_input or check_output.
void check_apart(Report& report, std::string_view output, const ConstTensorView& output_view, std::string_view other,
                 const ConstTensorView& other_view);

std::string shape_text(const ConstTensorView& view);
std::string stride_text(const ConstTensorView& view);
std::string hex(const void* address);

}  // namespace dspattn::core
