"""Slow and obvious versions of every kernel in csrc/: lists, loops, a look at every pack.

Items are pairs (id, length). A kernel that takes `multiple` charges lengths rounded up to it. What
the headers of csrc/ leave open is said here, in the docstring of the function concerned.
"""

from bisect import bisect_left, bisect_right

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
MANY_ITEMS = 1 << 16  # from here on best_fit may pack two streams
WINDOW = 256  # how far greedy_fill looks
PAIRS = 8  # how many pairs look_ahead tries
DRAWS = 8  # how many times it draws until it meets a sequence that is there
CANDIDATES = 8  # how many open steps mixed_steps looks at
ROUNDS, ENOUGH = 32, 256


def mix(state):
    """The output of splitmix64 at `state`."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & MASK
    return state ^ (state >> 31)


class Random:
    """splitmix64."""

    def __init__(self, seed):
        self.state = seed & MASK

    def next(self):
        self.state = (self.state + GOLDEN) & MASK
        return mix(self.state)

    def below(self, bound):
        return self.next() * bound >> 64

    def shuffle(self, values):
        """In place, from the last value to the second: each changes places with one up to it.

        A word serves two values, its upper 32 bits first (for less than 2^32 of them).
        """
        word, halves = 0, 0
        for last in range(len(values) - 1, 0, -1):
            if halves == 0:
                word, halves = self.next(), 2
            halves -= 1
            other = (word >> 32 * halves & 0xFFFFFFFF) * (last + 1) >> 32
            values[last], values[other] = values[other], values[last]


def charge(length, multiple):
    return -(-length // multiple) * multiple


def shuffled_by_level(seq_lens, limits, seed, chosen=None):
    """(items, starts): sequences by level, the longest level first, each level in random order.

    Place i of the input has 16 random bits, which choose a bucket of its level by their upper bits:
    1 bucket for up to 4096 places in all, else 2, 4, ... up to 2048, until that many buckets would
    have 4096 places each. A bucket lists its sequences by place and is then shuffled, with a seed
    made of its number; buckets are numbered through all levels, the longest level first.
    """
    by_level = [[] for _ in limits]
    places = range(len(seq_lens)) if chosen is None else chosen
    for place, sequence in enumerate(places):
        length = int(seq_lens[sequence])
        if length == 0:
            continue
        level = next(k for k in range(len(limits)) if length <= limits[k])
        word = mix((seed + (place // 4 + 1) * GOLDEN) & MASK)
        bits = word >> 16 * (place % 4) & 0xFFFF
        by_level[level].append((bits, (int(sequence), length)))
    choice_bits = 0
    while choice_bits < 11 and len(places) >> choice_bits > 4096:
        choice_bits += 1
    items, starts, num_buckets = [], [0], 0
    for here in reversed(by_level):
        buckets = [[] for _ in range(1 << choice_bits)]
        for bits, item in here:
            buckets[bits >> (16 - choice_bits)].append(item)
        for bucket in buckets:
            Random(mix(seed) + num_buckets).shuffle(bucket)
            items += bucket
            num_buckets += 1
        starts.append(len(items))
    return items, starts


def descending(items, seed):
    """Items by descending length; those of one length are shuffled, seeded by the length."""
    by_length = {}
    for item in items:
        by_length.setdefault(item[1], []).append(item)
    for length, equal in by_length.items():
        Random(mix(seed) + length).shuffle(equal)
    return [item for length in sorted(by_length, reverse=True) for item in by_length[length]]


def best_fit(items, capacity, multiple=1, in_streams=False):
    """(pack_of, num_packs): each item into the fullest pack that holds it, the last changed one.

    A pack changes when it gets an item.
    """
    packs = []  # [free tokens, when it changed, number]
    if not in_streams or len(items) < MANY_ITEMS:
        return _place_best_fit(items, capacity, multiple, packs), len(packs)
    stream = len(items) // 64 * 31
    pack_of = []
    for first in (0, stream):
        own = []
        here = _place_best_fit(items[first : first + stream], capacity, multiple, own)
        pack_of += [len(packs) + pack for pack in here]
        packs += [[space, len(packs) + number, len(packs) + number] for space, _, number in own]
    return pack_of + _place_best_fit(items[2 * stream :], capacity, multiple, packs), len(packs)


def _place_best_fit(items, capacity, multiple, packs):
    pack_of = []
    for turn, (_, length) in enumerate(items, start=len(packs)):
        need = charge(length, multiple)
        fitting = [pack for pack in packs if pack[0] >= need]
        if not fitting:
            packs.append([capacity, turn, len(packs)])
            fitting = packs[-1:]
        pack = min(fitting, key=lambda pack: (pack[0], -pack[1]))
        pack[0] -= need
        pack[1] = turn
        pack_of.append(pack[2])
    return pack_of


def first_fit(items, capacity, multiple=1):
    """(pack_of, num_packs): each item into the pack that was opened first of those that hold it."""
    pack_of, spaces = [], []
    for _, length in items:
        need = charge(length, multiple)
        pack = next((p for p in range(len(spaces)) if spaces[p] >= need), len(spaces))
        if pack == len(spaces):
            spaces.append(capacity)
        spaces[pack] -= need
        pack_of.append(pack)
    return pack_of, len(spaces)


def next_fit(items, capacity, multiple=1):
    """(pack_of, num_packs): each item into the last pack, or into a new one."""
    pack_of, spaces = [], []
    for _, length in items:
        need = charge(length, multiple)
        if not spaces or spaces[-1] < need:
            spaces.append(capacity)
        spaces[-1] -= need
        pack_of.append(len(spaces) - 1)
    return pack_of, len(spaces)


def iterative_sampling(items, capacity, multiple, *, threshold, iterations, seed):
    """(items in their new order, pack_of, num_packs). The first time takes items as they come."""
    random = Random(seed)
    kept, rest = [], list(items)
    for iteration in range(1, max(iterations, 1) + 1):
        pack_of, num_packs = next_fit(rest, capacity, multiple)
        packs = [[] for _ in range(num_packs)]
        for item, pack in zip(rest, pack_of, strict=True):
            packs[pack].append(item)
        rest = []
        for pack in packs:
            load = sum(charge(length, multiple) for _, length in pack)
            if load >= threshold or iteration >= iterations:
                kept.append(pack)
            else:
                rest += pack
        random.shuffle(rest)
    numbers = [number for number, pack in enumerate(kept) for _ in pack]
    return [item for pack in kept for item in pack], numbers, len(kept)


def look_ahead(items, capacity, multiple, seed):
    """(pack_of, num_packs): packs of a level's own sequences, filled almost exactly.

    How many more are needed: as few as could fill the space if all were as long as the longest that
    fits. When no sequence leaves a sum that the others can reach, the longest that fits goes in. Of
    pairs that fill equally the first one counts; the longest that fits, alone, comes before them.
    """
    pool, random = _Pool(items, multiple), Random(seed)
    pack_of, num_packs = [-1] * len(items), 0
    while pool.there:
        chosen = [pool.there[-1]]
        if 2 * pool.charges[chosen[0]] <= capacity:
            chosen = [pool.draw(random, 0, chosen[0])]
        space = capacity
        while chosen:
            for rank in chosen:
                pool.there.remove(rank)
                pack_of[pool.places[rank]] = num_packs
                space -= pool.charges[rank]
            chosen = _next_of_pack(pool, space, random)
        num_packs += 1
    return pack_of, num_packs


def _next_of_pack(pool, space, random):
    """The ranks that go into a pack next: none, one, or the last two."""
    longest = pool.last_below(bisect_right(pool.charges, space))
    if longest is None:
        return []
    most, least = pool.charges[longest], pool.charges[pool.there[0]]
    if space - most < least:
        return [longest]
    num_more = -(-space // most)
    low, high = space - (num_more - 1) * most, space - (num_more - 1) * least
    can = [r for r in pool.there if low <= pool.charges[r] <= high and pool.charges[r] <= most]
    if not can:
        return [longest]
    if num_more > 2:
        return [pool.draw(random, can[0], can[-1])]
    gap, best = space - most, [longest]
    for _ in range(PAIRS):
        if gap == 0:
            break
        one = pool.draw(random, can[0], can[-1])
        rest = space - pool.charges[one]
        other = pool.last_below(bisect_right(pool.charges, rest))
        if other == one:
            other = pool.last_below(one)
        if other is not None and rest - pool.charges[other] < gap:
            gap, best = rest - pool.charges[other], [one, other]
    return best


class _Pool:
    """Sequences by rank: by ascending length, ties by place. `there`: the ranks in no pack yet."""

    def __init__(self, items, multiple):
        self.places = sorted(range(len(items)), key=lambda place: items[place][1])
        self.charges = [charge(items[place][1], multiple) for place in self.places]
        self.there = list(range(len(items)))

    def last_below(self, rank):
        index = bisect_left(self.there, rank)
        return self.there[index - 1] if index > 0 else None

    def draw(self, random, first, last):
        """A rank first .. last, drawn until it is there; the next one there after the last draw."""
        for _ in range(DRAWS):
            rank = first + random.below(last - first + 1)
            found = self.there[bisect_left(self.there, rank)]
            if found == rank:
                break
        return found


def greedy_fill(items, multiple, spaces, first_pack):
    """(items, spaces, pack_of of those taken): Algorithm 6 of the paper, with a window.

    Of equally long items in the window the first one is taken. A window of which nothing fits is
    put aside where the pack has room for an item of mean length, once for each pack.
    """
    items, spaces, pack_of = list(items), list(spaces), []
    aside = len(items)
    mean = sum(length for _, length in items) // max(1, len(items))
    for pack in range(len(spaces)):
        at_random = True
        renewed = False
        while len(pack_of) < len(items):
            front = len(pack_of)
            window = range(front, min(front + WINDOW, len(items)))
            fitting = [i for i in window if charge(items[i][1], multiple) <= spaces[pack]]
            at_random = at_random and front in fitting
            if not at_random:
                if not fitting:
                    if renewed or spaces[pack] < mean or len(items) - front < 2 * WINDOW:
                        break
                    if aside - front < 2 * WINDOW:
                        aside = len(items)
                    aside -= WINDOW
                    here, there = slice(front, front + WINDOW), slice(aside, aside + WINDOW)
                    items[here], items[there] = items[there], items[here]
                    renewed = True
                    continue
                found = max(fitting, key=lambda i: (items[i][1], -i))
                items[front], items[found] = items[found], items[front]
            spaces[pack] -= charge(items[front][1], multiple)
            pack_of.append(first_pack + pack)
    return items, spaces, pack_of


def group(items, pack_of, num_packs):
    """(ids by pack, offsets of packs): packs in the order of their numbers."""
    packs = [[] for _ in range(num_packs)]
    for (sequence, _), pack in zip(items, pack_of, strict=True):
        packs[pack].append(sequence)
    offsets = [0]
    for pack in packs:
        offsets.append(offsets[-1] + len(pack))
    return [sequence for pack in packs for sequence in pack], offsets


def gather(items, pack_of, starts):
    """Ids by pack, pack p's from starts[p] on, in the order of the items."""
    ids, places = [None] * len(items), list(starts)
    for (sequence, _), pack in zip(items, pack_of, strict=True):
        ids[places[pack]] = sequence
        places[pack] += 1
    return ids


def sum_packs(items, pack_of, num_packs):
    """[sequences, tokens, sum of squared lengths] of each pack."""
    sums = [[0, 0, 0] for _ in range(num_packs)]
    for (_, length), pack in zip(items, pack_of, strict=True):
        for column, term in enumerate((1, length, length**2)):
            sums[pack][column] += term
    return sums


def spread_packs(items, pack_of, capacity, multiple, chosen, *, num_new, num_packs):
    """(pack_of after spreading, sums of the chosen packs, then of the new ones).

    New packs are num_packs, num_packs + 1, ... chosen: each pack once.
    """

    def spread(members, packs):
        """The new pack of each member, and the most that a pack holds."""
        loads, result = [0] * len(packs), {}
        for i in sorted(members, key=lambda i: -items[i][1]):
            k = loads.index(min(loads))
            loads[k] += charge(items[i][1], multiple)
            result[i] = packs[k]
        return result, max(loads, default=0)

    new = list(range(num_packs, num_packs + num_new))
    members = {pack: [i for i in range(len(items)) if pack_of[i] == pack] for pack in chosen}
    moved, most = spread(sorted(i for pack in chosen for i in members[pack]), [*chosen, *new])
    if most > capacity:
        moved = {}
        for k, pack in enumerate(chosen):
            moved |= spread(members[pack], [pack, *new[k : k + 1]])[0]
    pack_of = [moved.get(i, pack) for i, pack in enumerate(pack_of)]
    sums = sum_packs(items, pack_of, num_packs + num_new)
    return pack_of, [sums[pack] for pack in [*chosen, *new]]


def class_tokens(items, pack_of, group_of, num_groups, bins, *, source_of=None, num_sources=0):
    """Tokens of each group of packs by class of length, then by source."""
    rows = [[0] * (len(bins) + 1 + num_sources) for _ in range(num_groups)]
    for (sequence, length), pack in zip(items, pack_of, strict=True):
        row = rows[group_of[pack]]
        row[bisect_left(bins, length)] += length
        if source_of is not None:
            row[len(bins) + 1 + source_of[sequence]] += length
    return rows


def replica_order(costs, starts, per_step, num_ranks):
    """The packs of every micro-batch by replica: the costliest to the least busy one."""
    order, busy = [], []
    for microbatch in range(len(starts) - 1):
        if microbatch % per_step == 0:
            busy = [0.0] * num_ranks
        packs = range(starts[microbatch], starts[microbatch + 1])
        cp_size = num_ranks // len(packs)
        ranks_of = [range(r * cp_size, (r + 1) * cp_size) for r in range(len(packs))]
        replicas = sorted(range(len(packs)), key=lambda r: max(busy[rank] for rank in ranks_of[r]))
        here = [-1] * len(packs)
        for pack, replica in zip(sorted(packs, key=lambda p: -costs[p]), replicas, strict=True):
            here[replica] = pack
            for rank in ranks_of[replica]:
                busy[rank] += costs[pack]
        order += here
    return order


def mixed_steps(deviations, per_step, seed, peaks=None):
    """Micro-batches of step 0, then of step 1, ...: steps that cost little.

    A step costs the norm of its summed deviations and, where peaks are given, its largest peak.
    With one step, or one micro-batch a step, nothing changes places.
    """
    random = Random(seed)
    num, num_steps = len(deviations), len(deviations) // per_step
    if peaks is None:
        result = _joined_greedily(deviations, num_steps, per_step, random)
    else:
        result = sorted(range(num), key=lambda i: -peaks[i])

    def cost(step):
        total = _norm([sum(column) for column in zip(*(deviations[i] for i in step), strict=True)])
        return total if peaks is None else total + max(peaks[i] for i in step)

    if num_steps < 2 or per_step < 2:
        return result
    for _ in range(ROUNDS):
        num_swaps = 0
        for _ in range(num):
            here, there = random.below(num), random.below(num)
            if here // per_step == there // per_step:
                continue
            swapped = list(result)
            swapped[here], swapped[there] = result[there], result[here]
            changed = [slice(at // per_step * per_step, None) for at in (here, there)]
            before, after = (
                sum(cost(order[part][:per_step]) for part in changed) for order in (result, swapped)
            )
            if after < before:
                result = swapped
                num_swaps += 1
        if num_swaps * ENOUGH < num:
            break
    return result


def _joined_greedily(deviations, num_steps, per_step, random):
    """From the largest deviation on, each micro-batch joins the step whose norm grows least.

    Open steps stand in a row, 0, 1, 2, ... at first; "the first of equals" is the first in the row.
    Where a full step stood, the last of the row moves. Without any deviation they stay in order.
    """
    steps = [[] for _ in range(num_steps)]
    sums = [[0] * len(deviations[0]) for _ in range(num_steps)]
    row = list(range(num_steps))
    if not any(map(_norm, deviations)):
        return list(range(len(deviations)))
    for microbatch in sorted(range(len(deviations)), key=lambda i: -_norm(deviations[i])):
        looked_at = range(len(row))
        if len(row) > CANDIDATES:
            looked_at = [random.below(len(row)) for _ in range(CANDIDATES)]
        changed = {i: _plus(sums[row[i]], deviations[microbatch]) for i in looked_at}
        growth = {i: _norm(changed[i]) - _norm(sums[row[i]]) for i in looked_at}
        best = min(growth, key=lambda i: (growth[i], len(steps[row[i]])))
        step = steps[row[best]]
        step.append(microbatch)
        sums[row[best]] = changed[best]
        if len(step) == per_step:
            row[best] = row[-1]
            row.pop()
    return [microbatch for step in steps for microbatch in step]


def _norm(vector):
    return sum(abs(value) for value in vector)


def _plus(one, other):
    return [a + b for a, b in zip(one, other, strict=True)]
