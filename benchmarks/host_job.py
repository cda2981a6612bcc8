"""torchrun -m benchmarks.host_job FLAGS...: one rank of `host_overhead.py`'s jobs."""

from megatron_hbp.host import pretrain_gpt

if __name__ == "__main__":
    pretrain_gpt.prepare_device()
    from benchmarks.host_measure import main

    main()
