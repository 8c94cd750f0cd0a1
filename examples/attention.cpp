#include <dspattn/attention.h>
#include <dspattn/workspace.h>

#include <iostream>
#include <vector>

int main() {
  const std::int64_t batch = 1, heads = 2, n = 256, d = 64;
  std::vector<float> q(batch * heads * n * d), k(q.size()), v(q.size(), 1.0f), out(q.size());
  for (std::size_t i = 0; i < q.size(); ++i) {
    q[i] = static_cast<float>(i % 13) / 13.0f;
    k[i] = static_cast<float>(i % 7) / 7.0f;
  }

  dspattn::ForwardArgs args;
  args.problem.q = {q.data(), dspattn::DType::f32, {batch, heads, n, d}};
  args.problem.k = {k.data(), dspattn::DType::f32, {batch, heads, n, d}};
  args.problem.v = {v.data(), dspattn::DType::f32, {batch, heads, n, d}};
  args.problem.pattern = {2, 4};  // of every four keys a query sees, the two with the largest scores
  args.problem.mask.causal = true;
  args.out = {out.data(), dspattn::DType::f32, {batch, heads, n, d}};

  try {
    dspattn::Workspace workspace;  // keep it: the next call uses the same memory
    workspace.attach(args);
    dspattn::forward(args);
  } catch (const dspattn::Error& error) {
    std::cerr << error.what() << "\n";  // every reason: which argument, what was expected, what was given
    return 1;
  }
  std::cout << "every value is 1, so every output is: " << out.front() << " ... " << out.back() << "\n";
}
