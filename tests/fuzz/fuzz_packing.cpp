// Random inputs for every kernel of csrc/, checked for what must hold of any answer; built with
// sanitizers. The same bytes give the same run.
//
//   fuzz_packing [--seconds S] [--runs N] [--seed FIRST]
//
// runs the seeds FIRST, FIRST + 1, ... until either limit and names a seed that fails. With clang,
// -fsanitize=fuzzer -DHBP_LIBFUZZER leaves main out and calls LLVMFuzzerTestOneInput itself.

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "filling.h"
#include "input.h"
#include "packing.h"
#include "random.h"

namespace hbp::fuzz {
namespace {

// The loads of packs that hold each item once.
template <typename Id>
std::vector<int64_t> Loads(const std::vector<Item<Id>>& items, const std::vector<Id>& pack_of,
                           int64_t num_packs, const Shape& shape) {
  std::vector<int64_t> loads(num_packs, 0);
  for (size_t i = 0; i < items.size(); ++i) {
    Check(pack_of[i] >= 0 && pack_of[i] < num_packs, "every item is in a pack");
    loads[pack_of[i]] += RoundUp(items[i].length, shape.multiple);
  }
  for (const int64_t load : loads) Check(load > 0, "no pack is empty");
  for (const int64_t load : loads) Check(load <= shape.capacity, "no pack is over its capacity");
  return loads;
}

template <typename Id>
void FuzzPackingOf(Input* input) {
  const Shape shape(input);
  auto items = PickItems<Id>(input, shape);
  const uint64_t seed = input->Seed();
  const int64_t threshold = input->Pick(0, shape.capacity + 1);
  const int64_t iterations = input->Pick(0, 5);
  const bool in_streams = input->Flip();
  std::vector<Id> pack_of(items.size(), -1);
  const auto [num, capacity, multiple, longest] = shape;
  Item<Id>* list = items.data();
  Id* out = pack_of.data();
  enum Packer { kBestFit, kFirstFit, kNextFit, kLookAhead, kSampling, kNumPackers };
  const std::function<int64_t()> packers[kNumPackers] = {
      [=] { return BestFit(list, num, capacity, multiple, in_streams, out); },
      [=] { return FirstFit(list, num, capacity, multiple, out); },
      [=] { return NextFit(list, num, capacity, multiple, out); },
      [=] { return LookAhead(list, num, capacity, multiple, seed, out); },
      [=] {
        return IterativeSampling(list, num, capacity, multiple, threshold, iterations, seed, out);
      },
  };
  const auto before = Sorted(items.begin(), items.end());
  for (int packer = 0; packer < kNumPackers; ++packer) {
    std::fill(pack_of.begin(), pack_of.end(), -1);
    const std::vector<int64_t> loads = Loads(items, pack_of, packers[packer](), shape);
    const bool streams = in_streams && num >= kManyItems;
    if (packer == kBestFit || packer == kFirstFit) {
      const auto half = std::count_if(loads.begin(), loads.end(),
                                      [&](int64_t load) { return 2 * load <= shape.capacity; });
      Check(half <= (packer == kBestFit && streams ? 2 : 1), "packs are more than half full");
    }
    Id next = 0;
    for (const Id pack : pack_of) {
      Check(pack <= next || packer == kLookAhead || (packer == kBestFit && streams),
            "packs are numbered as they are opened");
      next = std::max<Id>(next, pack + 1);
    }
    for (size_t pack = 1; packer == kNextFit && pack < loads.size(); ++pack) {
      Check(loads[pack - 1] + loads[pack] > capacity, "neighbours do not fit together");
    }
    if (packer != kSampling) continue;
    Check(std::is_sorted(pack_of.begin(), pack_of.end()), "ISF packs are contiguous");
    Check(Sorted(items.begin(), items.end()) == before, "ISF keeps the items");
  }

  if (items.empty()) return;
  int32_t& wrong = items[input->Pick(0, num - 1)].length;
  wrong = static_cast<int32_t>(input->Flip() ? input->Pick(-9, 0)
                                             : std::min<int64_t>(longest + 1, INT32_MAX));
  if (wrong == longest) return;
  for (const auto& packer : packers) {
    bool is_refused = false;
    try {
      packer();
    } catch (const std::invalid_argument&) {
      is_refused = true;
    }
    Check(is_refused, "a length out of range is refused");
  }
}

template <typename Id>
void FuzzFillingOf(Input* input) {
  const Shape shape(input);
  auto items = PickItems<Id>(input, shape);
  const auto before = Sorted(items.begin(), items.end());
  std::vector<int64_t> spaces(input->Pick(0, 40));
  for (int64_t& space : spaces) space = input->Pick(0, shape.capacity);
  std::vector<int64_t> left = spaces;
  const auto num_packs = static_cast<Id>(spaces.size());
  const auto first_pack = static_cast<Id>(input->Pick(0, 1000));
  std::vector<Id> pack_of(items.size(), -1);
  const int64_t taken = GreedyFill(items.data(), shape.num, shape.multiple, left.data(), num_packs,
                                   first_pack, pack_of.data());
  Check(taken >= 0 && taken <= shape.num, "items are taken");
  Check(Sorted(items.begin(), items.end()) == before, "greedy fill keeps the items");
  Check(std::is_sorted(pack_of.begin(), pack_of.begin() + taken), "packs are filled in order");
  Check(std::count(pack_of.begin() + taken, pack_of.end(), -1) == shape.num - taken,
        "what is not taken is in no pack");
  for (int64_t i = 0; i < taken; ++i) {
    const Id pack = pack_of[i] - first_pack;
    Check(pack >= 0 && pack < num_packs, "packs are numbered from first_pack on");
    spaces[pack] -= RoundUp(items[i].length, shape.multiple);
  }
  Check(spaces == left, "spaces are charged");
  for (const int64_t space : left) Check(space >= 0, "no pack is over its space");
  for (int64_t i = taken; num_packs > 0 && i < std::min(taken + kWindow, shape.num); ++i) {
    Check(RoundUp(items[i].length, shape.multiple) > left.back(), "the last pack is filled");
  }
}

}  // namespace

void FuzzPacking(Input* input) {
  if (input->Flip()) {
    FuzzPackingOf<int32_t>(input);
  } else {
    FuzzPackingOf<int64_t>(input);
  }
}

void FuzzFilling(Input* input) {
  if (input->Flip()) {
    FuzzFillingOf<int32_t>(input);
  } else {
    FuzzFillingOf<int64_t>(input);
  }
}

}  // namespace hbp::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace hbp::fuzz;
  constexpr void (*kTargets[])(Input*) = {FuzzPacking, FuzzFilling, FuzzOrder, FuzzBalance,
                                          FuzzSteps};
  Input input(data, size);
  kTargets[input.Pick(0, std::size(kTargets) - 1)](&input);
  return 0;
}

#ifndef HBP_LIBFUZZER

namespace {

uint64_t current_seed = 0;

void NameSeed(int) {
  std::fprintf(stderr, "failed with --seed %llu --runs 1\n",
               static_cast<unsigned long long>(current_seed));
}

void RunSeed(uint64_t seed) {
  current_seed = seed;
  hbp::Random random(seed);
  std::vector<uint8_t> bytes(random.Below(500));
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.Next());
  LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
}

}  // namespace

// Sanitizers end in an abort too, so that the seed is named.
extern "C" const char* __asan_default_options() { return "abort_on_error=1"; }
extern "C" const char* __ubsan_default_options() { return "abort_on_error=1:print_stacktrace=1"; }
extern "C" const char* __tsan_default_options() { return "abort_on_error=1:halt_on_error=1"; }

int main(int argc, char** argv) {
  double seconds = 10;
  uint64_t runs = UINT64_MAX;
  uint64_t seed = 0;
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i];
    char* end = nullptr;
    const double value = i + 1 < argc ? std::strtod(argv[i + 1], &end) : 0;
    const bool is_number = end != nullptr && end != argv[i + 1] && *end == 0 && value >= 0;
    if (is_number && name == "--seconds") {
      seconds = value;
    } else if (is_number && name == "--runs") {
      runs = static_cast<uint64_t>(value);
    } else if (is_number && name == "--seed") {
      seed = static_cast<uint64_t>(value);
    } else {
      std::fprintf(stderr, "use: fuzz_packing [--seconds S] [--runs N] [--seed FIRST]\n");
      return 2;
    }
  }
  std::signal(SIGABRT, NameSeed);
  const auto start = std::chrono::steady_clock::now();
  uint64_t done = 0;
  for (; done < runs; ++done) {
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
    if (spent.count() > seconds) break;
    RunSeed(seed + done);
  }
  std::printf("%llu runs without a violation\n", static_cast<unsigned long long>(done));
  return 0;
}

#endif  // HBP_LIBFUZZER
