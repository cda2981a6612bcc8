#include "mixing.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <vector>

#include "random.h"

namespace hbp {

Buffer<int64_t> MixedSteps(const int64_t* deviations, int64_t num, int64_t num_classes,
                           int64_t per_step, uint64_t seed) {
  const int64_t num_steps = num / per_step;
  std::vector<int64_t> sums(num_steps * num_classes, 0);
  const auto row = [&](int64_t microbatch) { return deviations + microbatch * num_classes; };
  const auto sum = [&](int64_t step) { return sums.data() + step * num_classes; };
  std::vector<int64_t> norms(num);
  for (int64_t i = 0; i < num; ++i) {
    norms[i] = 0;
    for (int64_t c = 0; c < num_classes; ++c) norms[i] += std::abs(row(i)[c]);
  }
  std::vector<int64_t> by_norm(num);
  std::iota(by_norm.begin(), by_norm.end(), 0);
  std::stable_sort(by_norm.begin(), by_norm.end(),
                   [&](int64_t one, int64_t other) { return norms[one] > norms[other]; });

  Random random(seed);
  Buffer<int64_t> steps(num);
  std::vector<int64_t> counts(num_steps, 0);
  std::vector<int64_t> open(num_steps);
  std::iota(open.begin(), open.end(), 0);
  for (const int64_t microbatch : by_norm) {
    const auto num_open = static_cast<int64_t>(open.size());
    const bool all = num_open <= kCandidates;
    int64_t best_index = -1;
    int64_t best_growth = 0;
    for (int64_t k = 0; k < (all ? num_open : kCandidates); ++k) {
      const int64_t index = all ? k : random.Below(num_open);
      const int64_t step = open[index];
      int64_t growth = 0;
      for (int64_t c = 0; c < num_classes; ++c) {
        growth += std::abs(sum(step)[c] + row(microbatch)[c]) - std::abs(sum(step)[c]);
      }
      if (best_index < 0 || growth < best_growth ||
          (growth == best_growth && counts[step] < counts[open[best_index]])) {
        best_index = index;
        best_growth = growth;
      }
    }
    const int64_t step = open[best_index];
    for (int64_t c = 0; c < num_classes; ++c) sum(step)[c] += row(microbatch)[c];
    steps[step * per_step + counts[step]++] = microbatch;
    if (counts[step] == per_step) {
      open[best_index] = open.back();
      open.pop_back();
    }
  }

  if (num_steps < 2 || per_step < 2) return steps;
  for (int64_t round = 0; round < kSwaps * num; ++round) {
    const int64_t here = random.Below(num);
    const int64_t there = random.Below(num);
    int64_t* sum_here = sum(here / per_step);
    int64_t* sum_there = sum(there / per_step);
    if (sum_here == sum_there) continue;
    const int64_t* row_here = row(steps[here]);
    const int64_t* row_there = row(steps[there]);
    int64_t growth = 0;
    for (int64_t c = 0; c < num_classes; ++c) {
      const int64_t change = row_there[c] - row_here[c];
      growth += std::abs(sum_here[c] + change) + std::abs(sum_there[c] - change) -
                std::abs(sum_here[c]) - std::abs(sum_there[c]);
    }
    if (growth >= 0) continue;
    for (int64_t c = 0; c < num_classes; ++c) {
      const int64_t change = row_there[c] - row_here[c];
      sum_here[c] += change;
      sum_there[c] -= change;
    }
    std::swap(steps[here], steps[there]);
  }
  return steps;
}

}  // namespace hbp
