// The only file that includes pybind11: checks shapes, types and ranges, releases the GIL, hands
// results over without a copy. Every function exists for ids of 32 and of 64 bits.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "assembly.h"
#include "balance.h"
#include "filling.h"
#include "mixing.h"
#include "order.h"
#include "packing.h"
#include "parallel.h"

namespace py = pybind11;

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;
template <typename Id>
using Items = Array<hbp::Item<Id>>;

void Require(bool condition, const char* rule) {
  if (!condition) throw std::invalid_argument(rule);
}

void RequireVector(const py::array& array, const char* name) {
  if (array.ndim() != 1) {
    throw std::invalid_argument(std::string(name) + " must be one-dimensional");
  }
}

// Gives a buffer's memory to NumPy.
template <typename T>
Array<T> ToArray(hbp::Buffer<T>&& buffer) {
  auto owned = std::make_unique<hbp::Buffer<T>>(std::move(buffer));
  const auto size = static_cast<py::ssize_t>(owned->size());
  T* data = owned->data();
  py::capsule owner(owned.get(), [](void* p) { delete static_cast<hbp::Buffer<T>*>(p); });
  owned.release();
  return Array<T>(size, data, owner);
}

template <typename T>
Array<T> ToArray(const std::vector<T>& values) {
  return Array<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

void CheckCapacity(int64_t capacity, int64_t multiple) {
  Require(capacity >= 1 && capacity <= INT32_MAX, "capacity must be 1 to 2147483647 tokens");
  Require(multiple >= 1 && multiple <= INT32_MAX, "multiple must be 1 to 2147483647 tokens");
}

template <typename Id>
void CheckShapes(const Items<Id>& items, const Array<Id>& pack_of) {
  RequireVector(items, "items");
  RequireVector(pack_of, "pack_of");
  Require(items.size() == pack_of.size(), "items and pack_of must be equally long");
}

// Items in packs 0 .. num_packs - 1, a pack for each item.
template <typename Id>
void CheckPacks(const Items<Id>& items, const Array<Id>& pack_of, int64_t num_packs) {
  CheckShapes(items, pack_of);
  const Id* packs = pack_of.data();
  const int64_t num = pack_of.size();
  hbp::InHalves(num, [&](int half) {
    Id least = 0;
    Id most = -1;
    const int64_t end = hbp::HalfStart(num, half + 1);
    for (int64_t i = hbp::HalfStart(num, half); i < end; ++i) {
      least = std::min(least, packs[i]);
      most = std::max(most, packs[i]);
    }
    Require(least >= 0 && most < num_packs, "pack_of must hold numbers below the number of packs");
  });
}

template <typename Length, typename Id>
py::tuple ShuffledByLevel(const Array<Length>& seq_lens, const Array<int64_t>& limits,
                          uint64_t seed, const std::optional<Array<Id>>& chosen) {
  RequireVector(seq_lens, "seq_lens");
  RequireVector(limits, "limits");
  Require(limits.size() >= 1, "limits must name a level");
  for (py::ssize_t level = 0; level < limits.size(); ++level) {
    Require(
        limits.at(level) >= (level > 0 ? limits.at(level - 1) : 0) && limits.at(level) <= INT32_MAX,
        "limits must ascend from 0 to 2147483647 tokens");
  }
  if (chosen) {
    RequireVector(*chosen, "chosen");
    for (py::ssize_t i = 0; i < chosen->size(); ++i) {
      Require(chosen->data()[i] >= 0 && chosen->data()[i] < seq_lens.size(),
              "chosen must hold indices of seq_lens");
    }
  }
  hbp::LevelItems<Id> sorted;
  {
    py::gil_scoped_release release;
    sorted = hbp::ShuffledByLevel<Length, Id>(seq_lens.data(), chosen ? chosen->data() : nullptr,
                                              chosen ? chosen->size() : seq_lens.size(),
                                              limits.data(), limits.size(), seed);
  }
  return py::make_tuple(ToArray(std::move(sorted.items)), ToArray(sorted.starts));
}

template <typename Id>
void SortDescending(Items<Id>& items, uint64_t seed) {
  RequireVector(items, "items");
  hbp::Item<Id>* data = items.mutable_data();
  const int64_t num = items.size();
  py::gil_scoped_release release;
  hbp::SortDescending(data, num, seed);
}

// Calls kernel(items, num, pack_of) without the GIL; writes into `out` where it is given.
template <typename Id, typename Kernel>
py::tuple Pack(const Items<Id>& items, int64_t capacity, int64_t multiple,
               const std::optional<Array<Id>>& out, const Kernel& kernel) {
  RequireVector(items, "items");
  CheckCapacity(capacity, multiple);
  if (out) {
    RequireVector(*out, "out");
    Require(out->size() == items.size(), "items and out must be equally long");
  }
  Array<Id> pack_of = out ? *out : ToArray(hbp::Buffer<Id>(items.size()));
  Id* to = pack_of.mutable_data();
  int64_t num_packs;
  {
    py::gil_scoped_release release;
    num_packs = kernel(items.data(), items.size(), to);
  }
  return py::make_tuple(pack_of, num_packs);
}

template <typename Id>
py::tuple IterativeSampling(Items<Id>& items, int64_t capacity, int64_t multiple, int64_t threshold,
                            int64_t iterations, uint64_t seed,
                            const std::optional<Array<Id>>& out) {
  hbp::Item<Id>* data = items.mutable_data();
  return Pack<Id>(items, capacity, multiple, out,
                  [&](const hbp::Item<Id>*, int64_t num, Id* pack_of) {
                    return hbp::IterativeSampling(data, num, capacity, multiple, threshold,
                                                  iterations, seed, pack_of);
                  });
}

template <typename Id>
int64_t GreedyFill(Items<Id>& items, int64_t multiple, Array<int64_t>& spaces, int64_t first_pack,
                   Array<Id>& pack_of) {
  RequireVector(items, "items");
  RequireVector(spaces, "spaces");
  RequireVector(pack_of, "pack_of");
  Require(items.size() == pack_of.size(), "items and pack_of must be equally long");
  CheckCapacity(1, multiple);
  hbp::Item<Id>* data = items.mutable_data();
  int64_t* free = spaces.mutable_data();
  for (py::ssize_t pack = 0; pack < spaces.size(); ++pack) {
    Require(free[pack] >= 0 && free[pack] <= INT32_MAX, "spaces must be 0 to 2147483647 tokens");
  }
  Id* packs = pack_of.mutable_data();
  const int64_t num = items.size();
  const int64_t num_packs = spaces.size();
  py::gil_scoped_release release;
  return hbp::GreedyFill(data, num, multiple, free, num_packs, static_cast<Id>(first_pack), packs);
}

template <typename Id>
py::tuple Group(const Items<Id>& items, const Array<Id>& pack_of, int64_t num_packs) {
  CheckShapes(items, pack_of);
  Require(num_packs >= 0, "pack_of must hold numbers below the number of packs");
  hbp::Buffer<Id> ids;
  std::vector<int64_t> offsets;
  {
    py::gil_scoped_release release;
    ids = hbp::Group(items.data(), pack_of.data(), items.size(), num_packs, &offsets);
  }
  return py::make_tuple(ToArray(std::move(ids)), ToArray(offsets));
}

template <typename Id>
Array<Id> Gather(const Items<Id>& items, const Array<Id>& pack_of, const Array<int64_t>& starts) {
  RequireVector(starts, "starts");
  CheckShapes(items, pack_of);
  hbp::Buffer<Id> ids;
  {
    py::gil_scoped_release release;
    ids = hbp::Gather(items.data(), pack_of.data(), items.size(), starts.data(), starts.size());
  }
  return ToArray(std::move(ids));
}

Array<int64_t> ToArray(const hbp::Buffer<hbp::PackSum>& sums) {
  const int64_t num = sums.size();
  Array<int64_t> result({int64_t{3}, num});
  int64_t* to = result.mutable_data();
  for (int64_t pack = 0; pack < num; ++pack) {
    to[pack] = sums[pack].count;
    to[num + pack] = sums[pack].tokens;
    to[2 * num + pack] = sums[pack].squares;
  }
  return result;
}

template <typename Id>
Array<int64_t> SumPacks(const Items<Id>& items, const Array<Id>& pack_of, int64_t num_packs) {
  CheckPacks(items, pack_of, num_packs);
  hbp::Buffer<hbp::PackSum> sums;
  {
    py::gil_scoped_release release;
    sums = hbp::SumPacks(items.data(), pack_of.data(), items.size(), num_packs);
  }
  return ToArray(sums);
}

template <typename Id>
Array<int64_t> SpreadPacks(const Items<Id>& items, Array<Id>& pack_of, int64_t capacity,
                           int64_t multiple, const Array<int64_t>& chosen, int64_t num_new,
                           int64_t num_packs) {
  CheckPacks(items, pack_of, num_packs);
  CheckCapacity(capacity, multiple);
  RequireVector(chosen, "chosen");
  Require(num_new >= 0 && num_new <= INT32_MAX, "num_new must be 0 to 2147483647");
  for (py::ssize_t k = 0; k < chosen.size(); ++k) {
    Require(chosen.at(k) >= 0 && chosen.at(k) < num_packs, "chosen must name packs");
  }
  Id* packs = pack_of.mutable_data();
  hbp::Buffer<hbp::PackSum> sums;
  {
    py::gil_scoped_release release;
    sums = hbp::SpreadPacks(items.data(), packs, items.size(), capacity, multiple, chosen.data(),
                            chosen.size(), num_new, num_packs);
  }
  return ToArray(sums);
}

template <typename Id>
Array<int64_t> ClassTokens(const Items<Id>& items, const Array<Id>& pack_of,
                           const Array<int32_t>& group_of, int64_t num_groups,
                           const Array<int64_t>& bins,
                           const std::optional<Array<int32_t>>& source_of, int64_t num_sources) {
  RequireVector(group_of, "group_of");
  RequireVector(bins, "bins");
  CheckPacks(items, pack_of, group_of.size());
  Require(
      num_groups >= 0 && num_groups <= INT32_MAX && num_sources >= 0 && num_sources <= INT32_MAX,
      "num_groups and num_sources must be 0 to 2147483647");
  for (py::ssize_t pack = 0; pack < group_of.size(); ++pack) {
    Require(group_of.at(pack) >= 0 && group_of.at(pack) < num_groups, "group_of must name groups");
  }
  if (source_of) {
    RequireVector(*source_of, "source_of");
    for (py::ssize_t i = 0; i < items.size(); ++i) {
      const Id id = items.data()[i].id;
      Require(id >= 0 && id < source_of->size(), "source_of must cover every id");
      Require(source_of->data()[id] >= 0 && source_of->data()[id] < num_sources,
              "source_of must name sources");
    }
  }
  hbp::Buffer<int64_t> tokens;
  {
    py::gil_scoped_release release;
    tokens = hbp::ClassTokens(items.data(), pack_of.data(), items.size(), group_of.data(),
                              num_groups, bins.data(), bins.size(),
                              source_of ? source_of->data() : nullptr, num_sources);
  }
  return ToArray(std::move(tokens)).reshape({num_groups, static_cast<int64_t>(-1)});
}

Array<int64_t> ReplicaOrder(const Array<double>& costs, const Array<int64_t>& starts,
                            int64_t per_step, int64_t num_ranks) {
  RequireVector(costs, "costs");
  RequireVector(starts, "starts");
  Require(per_step >= 1 && num_ranks >= 1 && starts.size() >= 1 && starts.at(0) == 0 &&
              starts.at(starts.size() - 1) == costs.size(),
          "starts must run from 0 to the number of packs");
  for (py::ssize_t i = 1; i < starts.size(); ++i) {
    const int64_t replicas = starts.at(i) - starts.at(i - 1);
    Require(replicas >= 1 && num_ranks % replicas == 0, "replicas must divide the ranks");
  }
  for (py::ssize_t pack = 0; pack < costs.size(); ++pack) {
    Require(std::isfinite(costs.at(pack)), "costs must be finite");
  }
  hbp::Buffer<int64_t> order;
  {
    py::gil_scoped_release release;
    order = hbp::ReplicaOrder(costs.data(), starts.data(), starts.size() - 1, per_step, num_ranks);
  }
  return ToArray(std::move(order));
}

Array<int64_t> MixedSteps(const Array<int64_t>& deviations, int64_t per_step, uint64_t seed,
                          const std::optional<Array<int64_t>>& peaks) {
  Require(deviations.ndim() == 2, "deviations must be two-dimensional");
  Require(per_step >= 1 && deviations.shape(0) % per_step == 0,
          "per_step must divide the micro-batches");
  // Eight norms of a step's sum are added up in 64 bits.
  const int64_t most = INT64_MAX / 8 / per_step / std::max<int64_t>(deviations.shape(1), 1);
  for (const int64_t* value = deviations.data(); value != deviations.data() + deviations.size();
       ++value) {
    Require(*value >= -most && *value <= most, "deviations are too large for 64-bit sums");
  }
  if (peaks) {
    RequireVector(*peaks, "peaks");
    Require(peaks->size() == deviations.shape(0), "peaks must have one entry per micro-batch");
    for (py::ssize_t i = 0; i < peaks->size(); ++i) {
      Require(peaks->at(i) >= 0 && peaks->at(i) <= most, "peaks must be 0 or more and fit sums");
    }
  }
  hbp::Buffer<int64_t> steps;
  {
    py::gil_scoped_release release;
    steps = hbp::MixedSteps(deviations.data(), deviations.shape(0), deviations.shape(1), per_step,
                            peaks ? peaks->data() : nullptr, seed);
  }
  return ToArray(std::move(steps));
}

template <typename Length>
py::tuple Survey(const Array<Length>& seq_lens) {
  RequireVector(seq_lens, "seq_lens");
  int64_t least = INT64_MAX;
  int64_t most = INT64_MIN;
  uint64_t total = 0;  // wraps where lengths are absurd
  const Length* lengths = seq_lens.data();
  for (py::ssize_t i = 0; i < seq_lens.size(); ++i) {
    const int64_t length = lengths[i];
    least = std::min(least, length);
    most = std::max(most, length);
    total += static_cast<uint64_t>(length);
  }
  return py::make_tuple(least, most, static_cast<int64_t>(total));
}

template <typename Length>
void DefineForLengths(py::module_& module) {
  module.def("survey", Survey<Length>, py::arg("seq_lens").noconvert(),
             "(least, most, sum) of the lengths.");
}

template <typename Length, typename Id>
void DefineShuffle(py::module_& module, const char* name) {
  module.def(name, ShuffledByLevel<Length, Id>, py::arg("seq_lens").noconvert(),
             py::arg("limits").noconvert(), py::arg("seed"),
             py::arg("chosen").noconvert() = py::none(),
             "Sequences by level, the longest level first, in random order: (items, starts).");
}

template <typename Id>
void DefineForIds(py::module_& module) {
  const auto items = py::arg("items").noconvert();
  const auto pack_of = py::arg("pack_of").noconvert();
  const auto out = py::arg("out").noconvert() = py::none();
  module.def("sort_descending", SortDescending<Id>, items, py::arg("seed"),
             "Sorts items in place by falling length, ties at random.");
  module.def(
      "best_fit",
      [](const Items<Id>& list, int64_t capacity, int64_t multiple, bool in_streams,
         const std::optional<Array<Id>>& to) {
        return Pack<Id>(list, capacity, multiple, to,
                        [&](const hbp::Item<Id>* data, int64_t num, Id* packs) {
                          return hbp::BestFit(data, num, capacity, multiple, in_streams, packs);
                        });
      },
      items, py::arg("capacity"), py::arg("multiple") = 1, py::arg("in_streams") = false, out,
      "Each item into the fullest pack that holds it: (pack_of, num_packs).");
  module.def(
      "first_fit",
      [](const Items<Id>& list, int64_t capacity, int64_t multiple,
         const std::optional<Array<Id>>& to) {
        return Pack<Id>(list, capacity, multiple, to,
                        [&](const hbp::Item<Id>* data, int64_t num, Id* packs) {
                          return hbp::FirstFit(data, num, capacity, multiple, packs);
                        });
      },
      items, py::arg("capacity"), py::arg("multiple") = 1, out,
      "Each item into the first pack that holds it: (pack_of, num_packs).");
  module.def(
      "next_fit",
      [](const Items<Id>& list, int64_t capacity, int64_t multiple,
         const std::optional<Array<Id>>& to) {
        return Pack<Id>(list, capacity, multiple, to,
                        [&](const hbp::Item<Id>* data, int64_t num, Id* packs) {
                          return hbp::NextFit(data, num, capacity, multiple, packs);
                        });
      },
      items, py::arg("capacity"), py::arg("multiple") = 1, out,
      "Each item into the last pack or a new one: (pack_of, num_packs).");
  module.def("iterative_sampling", IterativeSampling<Id>, items, py::arg("capacity"),
             py::arg("multiple"), py::arg("threshold"), py::arg("iterations"), py::arg("seed"), out,
             "ISF; reorders items in place: (pack_of, num_packs).");
  module.def(
      "look_ahead",
      [](const Items<Id>& list, int64_t capacity, int64_t multiple, uint64_t seed,
         const std::optional<Array<Id>>& to) {
        return Pack<Id>(list, capacity, multiple, to,
                        [&](const hbp::Item<Id>* data, int64_t num, Id* packs) {
                          return hbp::LookAhead(data, num, capacity, multiple, seed, packs);
                        });
      },
      items, py::arg("capacity"), py::arg("multiple"), py::arg("seed"), out,
      "Packs filled almost exactly: (pack_of, num_packs).");
  module.def("greedy_fill", GreedyFill<Id>, items, py::arg("multiple"),
             py::arg("spaces").noconvert(), py::arg("first_pack"), pack_of,
             "Fills spaces from the front of items, in place; returns how many were taken.");
  module.def(
      "empty_packs", [](const Items<Id>& list) { return ToArray(hbp::Buffer<Id>(list.size())); },
      items, "Room for the pack of each item, not filled.");
  module.def("group", Group<Id>, items, pack_of, py::arg("num_packs"),
             "Ids by pack, in the order of pack numbers: (ids, offsets).");
  module.def("gather", Gather<Id>, items, pack_of, py::arg("starts").noconvert(),
             "Ids by pack, pack p's from starts[p] on.");
  module.def("sum_packs", SumPacks<Id>, items, pack_of, py::arg("num_packs"),
             "int64 [3, packs]: sequences, tokens, sum of squared lengths.");
  module.def("spread_packs", SpreadPacks<Id>, items, pack_of, py::arg("capacity"),
             py::arg("multiple"), py::arg("chosen").noconvert(), py::arg("num_new"),
             py::arg("num_packs"),
             "Spreads chosen packs over new ones too, in place; sums, int64 [3, chosen + new].");
  module.def("class_tokens", ClassTokens<Id>, items, pack_of, py::arg("group_of").noconvert(),
             py::arg("num_groups"), py::arg("bins").noconvert(),
             py::arg("source_of").noconvert() = py::none(), py::arg("num_sources") = 0,
             "int64 [groups, classes]: tokens by group of packs and class of length and source.");
}

// The part of a pack, checked.
hbp::Part PackPart(const Array<int32_t>& bounds, const Array<int64_t>& lengths, int64_t low,
                   int64_t size) {
  RequireVector(bounds, "bounds");
  RequireVector(lengths, "lengths");
  const int64_t num_documents = bounds.size() - 1;
  Require(num_documents >= 1 && bounds.at(0) == 0, "bounds must start at 0 and name a document");
  Require(lengths.size() <= num_documents, "there must be a document for each sequence");
  for (int64_t d = 0; d < num_documents; ++d) {
    Require(bounds.at(d) < bounds.at(d + 1), "bounds must rise");
  }
  for (int64_t d = 0; d < lengths.size(); ++d) {
    Require(lengths.at(d) >= 1 && lengths.at(d) <= bounds.at(d + 1) - bounds.at(d),
            "a sequence must fit its document");
  }
  const int64_t pack_len = bounds.at(num_documents);
  Require(size >= 1 && size <= pack_len && low >= 0 && low <= pack_len - size,
          "the part must lie in the pack");
  return {bounds.data(), num_documents, static_cast<int64_t>(lengths.size()), low, size};
}

py::tuple PackLayout(const Array<int32_t>& bounds, const Array<int64_t>& lengths, int64_t low,
                     int64_t size) {
  const hbp::Part part = PackPart(bounds, lengths, low, size);
  Array<int64_t> positions(size);
  Array<bool> padding(size);
  static_assert(sizeof(bool) == sizeof(uint8_t), "NumPy's bool is a byte");
  auto* mask = reinterpret_cast<uint8_t*>(padding.mutable_data());
  hbp::Layout(part, lengths.data(), positions.mutable_data(), mask);
  return py::make_tuple(positions, padding);
}

// Where each sequence lies in the values of its corpus.
template <typename Token>
std::vector<hbp::Source<Token>> Sources(const Array<int64_t>& lengths, const Array<int32_t>& corpus,
                                        const Array<int64_t>& starts,
                                        const std::vector<Array<Token>>& tokens,
                                        const std::vector<Array<uint8_t>>& masks) {
  RequireVector(corpus, "corpus");
  RequireVector(starts, "starts");
  for (const auto& values : tokens) RequireVector(values, "tokens");
  for (const auto& values : masks) RequireVector(values, "masks");
  Require(corpus.size() == lengths.size() && starts.size() == lengths.size(),
          "lengths, corpus and starts must be equally long");
  Require(tokens.size() == masks.size(), "there must be a mask for each corpus");
  std::vector<hbp::Source<Token>> sources;
  sources.reserve(lengths.size());
  for (py::ssize_t i = 0; i < lengths.size(); ++i) {
    const int32_t k = corpus.at(i);
    Require(k >= 0 && k < static_cast<int64_t>(tokens.size()), "corpus must number the corpora");
    const int64_t start = starts.at(i);
    const int64_t room = std::min(tokens[k].size(), masks[k].size()) - lengths.at(i);
    Require(start >= 0 && start <= room, "a sequence must lie in its corpus");
    sources.push_back({tokens[k].data() + start, masks[k].data() + start, lengths.at(i)});
  }
  return sources;
}

template <typename Token>
Array<int64_t> PackTokens(const Array<int32_t>& bounds, const Array<int64_t>& lengths, int64_t low,
                          int64_t size, const Array<int32_t>& corpus, const Array<int64_t>& starts,
                          const std::vector<Array<Token>>& tokens,
                          const std::vector<Array<uint8_t>>& masks) {
  const hbp::Part part = PackPart(bounds, lengths, low, size);
  const auto sources = Sources<Token>(lengths, corpus, starts, tokens, masks);
  Array<int64_t> filled(size);
  int64_t* to = filled.mutable_data();
  py::gil_scoped_release release;  // pages may have to come from a disk
  hbp::FillTokens(part, sources.data(), to);
  return filled;
}

template <typename Token>
py::tuple PackTargets(const Array<int32_t>& bounds, const Array<int64_t>& lengths, int64_t low,
                      int64_t size, const Array<int32_t>& corpus, const Array<int64_t>& starts,
                      const std::vector<Array<Token>>& tokens,
                      const std::vector<Array<uint8_t>>& masks, const Array<float>& weights) {
  const hbp::Part part = PackPart(bounds, lengths, low, size);
  const auto sources = Sources<Token>(lengths, corpus, starts, tokens, masks);
  RequireVector(weights, "weights");
  Require(weights.size() == lengths.size(), "there must be a weight for each sequence");
  Array<int64_t> targets(size);
  Array<float> loss_weights(size);
  int64_t* to = targets.mutable_data();
  float* weights_to = loss_weights.mutable_data();
  int64_t num_trained;
  {
    py::gil_scoped_release release;
    num_trained = hbp::FillTargets(part, sources.data(), weights.data(), to, weights_to);
  }
  return py::make_tuple(targets, loss_weights, num_trained);
}

template <typename Token>
void DefineForTokens(py::module_& module) {
  const auto bounds = py::arg("bounds").noconvert();
  const auto lengths = py::arg("lengths").noconvert();
  const auto corpus = py::arg("corpus").noconvert();
  const auto starts = py::arg("starts").noconvert();
  const auto tokens = py::arg("tokens").noconvert();
  const auto masks = py::arg("masks").noconvert();
  module.def("pack_tokens", PackTokens<Token>, bounds, lengths, py::arg("low"), py::arg("size"),
             corpus, starts, tokens, masks, "int64 [size]: a rank's tokens, but for the tail.");
  module.def("pack_targets", PackTargets<Token>, bounds, lengths, py::arg("low"), py::arg("size"),
             corpus, starts, tokens, masks, py::arg("weights").noconvert(),
             "(targets int64 [size], loss weights float32 [size], how many are trained).");
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "Kernels of megatron_hbp; packing.py, balance.py and dataset.py are the doors.";
  PYBIND11_NUMPY_DTYPE(hbp::Item<int32_t>, id, length);
  PYBIND11_NUMPY_DTYPE(hbp::Item<int64_t>, id, length);
  module.attr("ITEM32") = py::dtype::of<hbp::Item<int32_t>>();
  module.attr("ITEM64") = py::dtype::of<hbp::Item<int64_t>>();
  DefineForLengths<int32_t>(module);
  DefineForLengths<int64_t>(module);
  DefineShuffle<int32_t, int32_t>(module, "shuffled_by_level");
  DefineShuffle<int64_t, int32_t>(module, "shuffled_by_level");
  DefineShuffle<int32_t, int64_t>(module, "shuffled_by_level_wide");
  DefineShuffle<int64_t, int64_t>(module, "shuffled_by_level_wide");
  DefineForIds<int32_t>(module);
  DefineForIds<int64_t>(module);
  DefineForTokens<uint16_t>(module);
  DefineForTokens<int32_t>(module);
  module.def("pack_layout", PackLayout, py::arg("bounds").noconvert(),
             py::arg("lengths").noconvert(), py::arg("low"), py::arg("size"),
             "(positions int64 [size], padding bool [size]) of a rank's part of a pack.");
  module.def("replica_order", ReplicaOrder, py::arg("costs").noconvert(),
             py::arg("starts").noconvert(), py::arg("per_step"), py::arg("num_ranks"),
             "Packs in the order of replicas that evens out every step.");
  module.def("mixed_steps", MixedSteps, py::arg("deviations").noconvert(), py::arg("per_step"),
             py::arg("seed"), py::arg("peaks").noconvert() = py::none(),
             "Micro-batches, step by step, each step close to the mixture.");
}
