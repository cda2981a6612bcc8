"""The children of many `hbp check`: megatron is loaded once, each question gets a forked process.

python -m tests.host.forked_checks QUESTION.json ...: answers as megatron_hbp.host.preflight does,
all for the capability of the first question.
"""

import argparse
import os
import sys
from pathlib import Path

from megatron_hbp.check.facts import Facts, Question
from megatron_hbp.host import cpu


def main() -> None:
    questions = [Question.load(path) for path in sys.argv[1:]]
    first = questions[0]
    cpu.install("meta", capability=first.capability, device_count=first.gpus_per_node)
    # only now: the stand-in device must be there before megatron is
    import megatron.core.tokenizers.text
    import megatron.training.arguments
    import megatron.training.training

    megatron.training.arguments.add_megatron_arguments(argparse.ArgumentParser())
    for question in questions:
        child = os.fork()
        if child == 0:
            try:
                _answer(question)
            finally:
                os._exit(0)
        os.waitpid(child, 0)


def _answer(question: Question) -> None:
    from megatron_hbp.host import preflight

    log = os.open(Path(question.workspace) / "host.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    facts = Facts()
    preflight.answer(question, facts)
    facts.save(question.workspace)


if __name__ == "__main__":
    main()
