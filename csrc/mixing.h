// Steps that look like the corpus: which micro-batches share a step.
// The kernel equals tests/reference.py exactly: all of it is integer arithmetic.

#ifndef HBP_MIXING_H_
#define HBP_MIXING_H_

#include <cstdint>

#include "buffer.h"

namespace hbp {

// Groups micro-batches into steps of `per_step` that cost little: the 1-norm of their summed
// deviations and, where `peaks` are given, the largest peak among them.
//
// deviations: int64 [num, num_classes], for each micro-batch and class of sequences the tokens it
// holds above (or below) what the corpus' mixture would give it. num is a multiple of per_step.
// peaks: int64 [num], 0 or more, or null. With them steps start as runs of micro-batches by falling
// peak (ties by index). Without them, from the largest deviation to the smallest (ties by index)
// each micro-batch joins the open step whose norm grows least, the one with fewest micro-batches of
// equals, the first of equals; from kCandidates open steps on, as many drawn at random are looked
// at; when there is no deviation they stay in order. Then, in up to kRounds rounds, num pairs drawn
// at random change places where that lowers the cost of both steps together; a round in which less
// than 1 / kEnough of num did is the last. Returns the micro-batches of step 0, then those of step
// 1, ...
Buffer<int64_t> MixedSteps(const int64_t* deviations, int64_t num, int64_t num_classes,
                           int64_t per_step, const int64_t* peaks, uint64_t seed);
constexpr int64_t kCandidates = 8;
constexpr int kRounds = 32;
constexpr int64_t kEnough = 256;

}  // namespace hbp

#endif  // HBP_MIXING_H_
