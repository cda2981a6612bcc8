#include "mixing.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <utility>
#include <vector>

#include "random.h"

namespace hbp {

namespace {

// 0 .. num - 1 by falling value, ties by index.
std::vector<int64_t> ByFalling(const int64_t* values, int64_t num) {
  std::vector<int64_t> order(num);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t one, int64_t other) { return values[one] > values[other]; });
  return order;
}

class Grouping {
 public:
  Grouping(const int64_t* deviations, int64_t num, int64_t num_classes, int64_t per_step,
           const int64_t* peaks)
      : deviations_(deviations),
        peaks_(peaks),
        num_(num),
        num_classes_(num_classes),
        per_step_(per_step),
        steps_(num),
        sums_(num / per_step * num_classes, 0) {}

  void InRunsByPeak() {
    const std::vector<int64_t> order = ByFalling(peaks_, num_);
    for (int64_t place = 0; place < num_; ++place) Join(place, order[place]);
  }

  void Greedily(Random* random) {
    std::vector<int64_t> norms(num_, 0);
    for (int64_t i = 0; i < num_; ++i) {
      for (int64_t c = 0; c < num_classes_; ++c) norms[i] += std::abs(Row(i)[c]);
    }
    const int64_t num_steps = num_ / per_step_;
    std::vector<int64_t> counts(num_steps, 0);
    std::vector<int64_t> open(num_steps);
    std::iota(open.begin(), open.end(), 0);
    if (std::all_of(norms.begin(), norms.end(), [](int64_t norm) { return norm == 0; })) {
      std::iota(steps_.begin(), steps_.end(), 0);
      return;
    }
    for (const int64_t microbatch : ByFalling(norms.data(), num_)) {
      const auto num_open = static_cast<int64_t>(open.size());
      const bool all = num_open <= kCandidates;
      int64_t best_index = -1;
      int64_t best_growth = 0;
      for (int64_t k = 0; k < (all ? num_open : kCandidates); ++k) {
        const int64_t index = all ? k : random->Below(num_open);
        const int64_t* sum = Sum(open[index]);
        int64_t growth = 0;
        for (int64_t c = 0; c < num_classes_; ++c) {
          growth += std::abs(sum[c] + Row(microbatch)[c]) - std::abs(sum[c]);
        }
        if (best_index < 0 || growth < best_growth ||
            (growth == best_growth && counts[open[index]] < counts[open[best_index]])) {
          best_index = index;
          best_growth = growth;
        }
      }
      const int64_t step = open[best_index];
      Join(step * per_step_ + counts[step]++, microbatch);
      if (counts[step] == per_step_) {
        open[best_index] = open.back();
        open.pop_back();
      }
    }
  }

  // Lets the micro-batches at two places change places if that lowers the cost of their steps.
  bool SwapIfBetter(int64_t here, int64_t there) {
    int64_t* sum_here = Sum(here / per_step_);
    int64_t* sum_there = Sum(there / per_step_);
    if (sum_here == sum_there) return false;
    const int64_t* row_here = Row(steps_[here]);
    const int64_t* row_there = Row(steps_[there]);
    int64_t growth = 0;
    if (peaks_ != nullptr) {
      growth = PeakWith(here, steps_[there]) - PeakWith(here, steps_[here]) +
               PeakWith(there, steps_[here]) - PeakWith(there, steps_[there]);
    }
    for (int64_t c = 0; c < num_classes_; ++c) {
      const int64_t change = row_there[c] - row_here[c];
      growth += std::abs(sum_here[c] + change) + std::abs(sum_there[c] - change) -
                std::abs(sum_here[c]) - std::abs(sum_there[c]);
    }
    if (growth >= 0) return false;
    for (int64_t c = 0; c < num_classes_; ++c) {
      const int64_t change = row_there[c] - row_here[c];
      sum_here[c] += change;
      sum_there[c] -= change;
    }
    std::swap(steps_[here], steps_[there]);
    return true;
  }

  // Whether every step is like the mixture and peaks do not count.
  bool IsPerfect() const {
    return peaks_ == nullptr &&
           std::all_of(sums_.begin(), sums_.end(), [](int64_t sum) { return sum == 0; });
  }

  Buffer<int64_t> Steps() && { return std::move(steps_); }

 private:
  const int64_t* Row(int64_t microbatch) const { return deviations_ + microbatch * num_classes_; }
  int64_t* Sum(int64_t step) { return sums_.data() + step * num_classes_; }

  void Join(int64_t place, int64_t microbatch) {
    steps_[place] = microbatch;
    int64_t* sum = Sum(place / per_step_);
    for (int64_t c = 0; c < num_classes_; ++c) sum[c] += Row(microbatch)[c];
  }

  // The largest peak of the step of `place` if `microbatch` were there.
  int64_t PeakWith(int64_t place, int64_t microbatch) const {
    int64_t peak = peaks_[microbatch];
    const int64_t first = place / per_step_ * per_step_;
    for (int64_t other = first; other < first + per_step_; ++other) {
      if (other != place) peak = std::max(peak, peaks_[steps_[other]]);
    }
    return peak;
  }

  const int64_t* deviations_;
  const int64_t* peaks_;
  int64_t num_;
  int64_t num_classes_;
  int64_t per_step_;
  Buffer<int64_t> steps_;      // the micro-batches of step 0, then those of step 1, ...
  std::vector<int64_t> sums_;  // by step: summed deviations
};

}  // namespace

Buffer<int64_t> MixedSteps(const int64_t* deviations, int64_t num, int64_t num_classes,
                           int64_t per_step, const int64_t* peaks, uint64_t seed) {
  Random random(seed);
  Grouping grouping(deviations, num, num_classes, per_step, peaks);
  if (peaks != nullptr) {
    grouping.InRunsByPeak();
  } else {
    grouping.Greedily(&random);
  }
  if (num == per_step || per_step == 1 || grouping.IsPerfect()) return std::move(grouping).Steps();
  int64_t num_swaps = num;
  for (int round = 0; round < kRounds && num_swaps * kEnough >= num; ++round) {
    num_swaps = 0;
    for (int64_t pair = 0; pair < num; ++pair) {
      const int64_t here = random.Below(num);
      num_swaps += grouping.SwapIfBetter(here, random.Below(num));
    }
  }
  return std::move(grouping).Steps();
}

}  // namespace hbp
