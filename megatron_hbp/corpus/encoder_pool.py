"""Encodes blocks in several processes, in order.

The processes are started by command, not forked: nothing of the caller (threads, open files, its
main module) and no module of the folder at hand gets into them, and they end when it does, however
that happens. An interruption from the keyboard is not theirs to hear.

Guarantees:
- the results come in order, and so do the errors: one of reading a block comes after the results
  of the blocks before it, whatever the number of processes.
"""

import contextlib
import os
import pickle
import queue
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron_hbp.corpus.blocks import Block
from megatron_hbp.corpus.row_encoder import EncodedBlock, Recipe, RowEncoder

_PACKAGES = Path(__file__).resolve().parents[2]  # where the workers find megatron_hbp
_AHEAD = 2  # blocks under way for each worker


class WorkerDiedError(ValueError):
    """A process that tokenises was killed."""


class EncoderPool:
    """num_workers processes, or this one alone when it is 1.

    A context manager: the processes end with it.
    """

    def __init__(self, recipe: Recipe, num_workers: int) -> None:
        self._encoder = RowEncoder(recipe) if num_workers == 1 else None
        self._workers = []
        if self._encoder is None:
            self._workers = [_Worker(pickle.dumps(recipe)) for _ in range(num_workers)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(max(1, len(self._workers)))

    def __enter__(self) -> "EncoderPool":
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.close()
        self._threads.shutdown()

    def encode(
        self, blocks: Iterable[tuple[int, Block]]
    ) -> Iterator[tuple[tuple[int, Block], EncodedBlock]]:
        """Yields each (any number, block) with what became of the block, in order.

        Raises WorkerDiedError when a worker is killed, RuntimeError when it fails.
        """
        if self._encoder is not None:
            for number, block in blocks:
                yield (number, block), self._encoder(block)
            return
        under_way: deque[tuple[tuple[int, Block], Future[EncodedBlock]]] = deque()
        source, failure = iter(blocks), None
        while failure is None:
            try:
                number, block = next(source)
            except StopIteration:
                break
            except ValueError as error:
                failure = error
                break
            under_way.append(((number, block), self._threads.submit(self._ask, block)))
            if len(under_way) > _AHEAD * len(self._workers):
                first, future = under_way.popleft()
                yield first, future.result()
        for first, future in under_way:
            yield first, future.result()
        if failure is not None:
            raise failure

    def _ask(self, block: Block) -> EncodedBlock:
        worker = self._idle.get()
        try:
            reply = worker.ask(block)
        finally:
            self._idle.put(worker)
        if isinstance(reply, str):
            raise RuntimeError(f"row {block.number} or one soon after it:\n{reply}")
        return reply


class _Worker:
    def __init__(self, recipe: bytes) -> None:
        paths = [str(_PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "TOKENIZERS_PARALLELISM": "false",  # there is a process for each core already
        }
        self._process = subprocess.Popen(
            # -P: modules of the folder at hand, which may hold anything, are not imported
            [sys.executable, "-P", "-m", "megatron_hbp.corpus.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            process_group=0,  # Ctrl-C is for the caller
        )
        self._recipe = recipe

    def ask(self, block: Block) -> Any:
        try:
            # the recipe goes with the first block, so that all workers start up at once
            self._send(self._recipe + pickle.dumps(block, protocol=pickle.HIGHEST_PROTOCOL))
            self._recipe = b""
            assert self._process.stdout is not None
            return pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            raise WorkerDiedError(
                f"a process that tokenises ended with exit code {self._process.wait()} near row "
                f"{block.number}; if it was killed for memory, use fewer --workers (the "
                "preparation goes on where it stopped)"
            ) from None

    def kill(self) -> None:
        # rather than closing stdin: a thread may be waiting for its answer
        self._process.kill()

    def close(self) -> None:
        """Waits for the end of a killed one."""
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # half a block may be left to write
                pipe.close()

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()
