"""Command lines: what a user can get wrong and the text that must come, and what is right.

Flags come after those of a small model for 4 ranks and 2 micro-batches of S = 64 tokens; `!--flag`
takes one of the model's flags away. {name} is a corpus or plan of test_errors.py.
"""

from tests.distributed import flags

PLAN = "--hbp-plan {plan}"
CORPUS = "--hbp-corpus {corpus} --hbp-level 64:1 --hbp-level 128:2"

# name: (flags, changed environment, pattern of the text)
CASES: dict[str, tuple[str, dict[str, int], str]] = {
    "pack_len_is_not_s_x_cp": (
        "--hbp-corpus {corpus} --hbp-level 64:1 --hbp-level 192:2",
        {},
        r"level 192:2: PACK_LEN must be S x CP with S = --seq-length 64; use 128:2, or "
        r"--seq-length 96",
    ),
    "pack_len_is_no_multiple_of_cp": (
        "--hbp-corpus {corpus} --hbp-level 64:1 --hbp-level 127:2",
        {},
        r"level 127:2: pack_len must be S x cp_size, a multiple of 2; use 126",
    ),
    "seq_length_is_not_s": (
        f"{PLAN} --seq-length 32",
        {},
        r"level 64:1: PACK_LEN must be S x CP with S = --seq-length 32; use 32:1, or "
        r"--seq-length 64",
    ),
    "cp_does_not_divide_ranks": (
        "--hbp-corpus {corpus} --hbp-level 256:4 --global-batch-size 6",
        {"WORLD_SIZE": 6},
        r"level 256:4: CP size 4 does not divide 6 ranks; choose one of \[1, 2, 3, 6\]",
    ),
    "cp_does_not_divide_heads": (
        "--hbp-corpus {corpus} --hbp-level 64:1 --hbp-level 512:8",
        {"WORLD_SIZE": 8},
        r"level 512:8: CP size 8 does not divide the 4 attention heads of a tensor-parallel rank",
    ),
    "cp_does_not_divide_heads_per_tp_rank": (
        "--hbp-corpus {corpus} --hbp-level 256:4 --tensor-model-parallel-size 2",
        {"WORLD_SIZE": 8},
        r"level 256:4: CP size 4 does not divide the 2 attention heads of a tensor-parallel rank",
    ),
    "br_d17_micro_batch_size": (
        f"{PLAN} --micro-batch-size 2",
        {},
        r"--micro-batch-size is 2; with HBP it must be 1: a micro-batch is one pack per rank; "
        r"raise "
        r"--seq-length and the levels' PACK_LEN instead",
    ),
    "eval_micro_batch_size": (
        f"{PLAN} --eval-micro-batch-size 2",
        {},
        r"--eval-micro-batch-size is 2; with HBP it must be 1",
    ),
    "context_parallel_size": (
        f"{PLAN} --context-parallel-size 2",
        {},
        r"--context-parallel-size is 2; with HBP it must be 1: the CP size of each pack comes from "
        r"--hbp-level",
    ),
    "global_batch_is_not_ranks_x_micro_batches": (
        f"{PLAN} --global-batch-size 6",
        {},
        r"--global-batch-size is 6; it must be ranks x micro-batches, a multiple of 4 ranks",
    ),
    "br_j16_global_batch_below_the_ranks": (
        f"{PLAN} --global-batch-size 4",
        {"WORLD_SIZE": 8},
        r"--global-batch-size is 4; it must be ranks x micro-batches, a multiple of 8 ranks",
    ),
    "eval_global_batch_is_not_ranks_x_micro_batches": (
        f"{PLAN} --eval-global-batch-size 6",
        {},
        r"--eval-global-batch-size is 6; it must be ranks x micro-batches, a multiple of 4 ranks",
    ),
    "world_size_is_not_a_multiple_of_tp_x_pp": (
        f"{PLAN} --pipeline-model-parallel-size 4",
        {"WORLD_SIZE": 6},
        r"the world size 6 is not a multiple of TP x PP = 4",
    ),
    "dataloader_type_is_missing": (
        f"{PLAN} !--dataloader-type",
        {},
        r"--dataloader-type is missing; HBP needs --dataloader-type external",
    ),
    "dataloader_type_is_another": (
        f"{PLAN} --dataloader-type cyclic",
        {},
        r"--dataloader-type is cyclic; HBP needs --dataloader-type external",
    ),
    "per_token_loss_is_missing": (
        f"{PLAN} !--calculate-per-token-loss",
        {},
        r"--calculate-per-token-loss is missing; HBP needs it",
    ),
    "s_is_not_a_multiple_of_tp": (
        "--hbp-corpus {corpus} --hbp-level 66:1 --seq-length 66 --tensor-model-parallel-size 4 "
        "--sequence-parallel",
        {},
        r"--seq-length 66 is not a multiple of 4 \(TP 4 under sequence parallelism x the "
        r"low-precision recipe's multiple\); use 68",
    ),
    "longest_level_is_beyond_the_positions": (
        f"{PLAN} --max-position-embeddings 64",
        {},
        r"--max-position-embeddings 64 is below the longest level 128:2; raise it to 128",
    ),
    "train_iters_beyond_the_plan": (
        f"{PLAN} --train-iters 1000",
        {},
        r"--train-iters 1000 is beyond the plan's \d+ steps \(1 epochs\); raise --hbp-epochs",
    ),
    "train_samples": (
        f"{PLAN} --train-samples 100",
        {},
        r"--train-samples is not supported with HBP: use --hbp-epochs or --train-iters",
    ),
    "br_j16_batch_size_ramp_up": (
        f"{PLAN} --rampup-batch-size 4 4 100",
        {},
        r"--rampup-batch-size is not supported with HBP: a plan has whole steps of one size",
    ),
    "br_j16_batch_size_schedule": (
        f"{PLAN} --step-batch-size-schedule 0:8",
        {},
        r"--step-batch-size-schedule is not supported with HBP: a plan has one batch size",
    ),
    "override_ckpt_iteration": (
        f"{PLAN} --override-ckpt-iteration 3",
        {},
        r"--override-ckpt-iteration is not supported with HBP: it would train samples twice or skip"
        r" them; leave it out",
    ),
    "br_n01_br_g09_multi_token_prediction": (
        f"{PLAN} --mtp-num-layers 1",
        {},
        r"--mtp-num-layers is not supported with HBP: multi-token prediction rebuilds stock layers",
    ),
    "qk_clip": (
        f"{PLAN} --qk-clip",
        {},
        r"--qk-clip is not supported with HBP: it reads attention logits that HBP",
    ),
    "full_validation": (
        f"{PLAN} --full-validation",
        {},
        r"--full-validation is not supported with HBP: --hbp-valid-corpus is evaluated whole "
        r"anyway",
    ),
    "sft": (
        f"{PLAN} --sft",
        {},
        r"--sft is not supported with HBP: HBP brings its own SFT data",
    ),
    "hybrid_context_parallel": (
        f"{PLAN} --hybrid-context-parallel",
        {},
        r"--hybrid-context-parallel is not supported with HBP: HBP switches the CP size itself",
    ),
    "cuda_graph_impl": (
        f"{PLAN} --cuda-graph-impl local",
        {},
        r"--cuda-graph-impl is not supported with HBP: a graph fixes the pack's boundaries",
    ),
    "enable_cuda_graph": (
        f"{PLAN} --enable-cuda-graph",
        {},
        r"--enable-cuda-graph is not supported with HBP: a graph fixes the pack's boundaries",
    ),
    "external_cuda_graph": (
        f"{PLAN} --external-cuda-graph",
        {},
        r"--external-cuda-graph is not supported with HBP: a graph fixes the pack's boundaries",
    ),
    "cpu_offload_with_per_level_recompute": (
        "--hbp-plan {dense_plan} --cpu-offloading-num-layers 1",
        {},
        r"--cpu-offloading-num-layers is not supported with per-level recompute \(level "
        r"128:2:full\)",
    ),
    "activation_offload_with_per_level_recompute": (
        "--hbp-plan {dense_plan} --fine-grained-activation-offloading",
        {},
        r"--fine-grained-activation-offloading is not supported with per-level recompute",
    ),
    "full_recompute_with_per_level_recompute": (
        "--hbp-plan {dense_plan} --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
        {},
        r"--recompute-granularity full and the recompute of level 128:2:full contradict each other",
    ),
    "unknown_level": (
        "--hbp-corpus {corpus} --hbp-level 64x1",
        {},
        r"level '64x1' is not PACK_LEN:CP\[:RECOMPUTE\]; RECOMPUTE is a number of layers or "
        r"'full', "
        r"e.g. 16384:1:28",
    ),
    "levels_do_not_ascend": (
        "--hbp-corpus {corpus} --hbp-level 128:2 --hbp-level 64:1",
        {},
        r"levels 128:2 and 64:1 do not ascend in pack_len; sort them, each once",
    ),
    "no_level": (
        "--hbp-corpus {corpus}",
        {},
        r"--hbp-corpus without --hbp-plan needs at least one --hbp-level, e.g. --hbp-level 16384:1",
    ),
    "neither_plan_nor_corpus": (
        "",
        {},
        r"no --hbp-plan and no --hbp-corpus; name one, or train with Megatron-LM's own "
        r"pretrain_gpt",
    ),
    "a_flag_without_plan_or_corpus": (
        "--hbp-epochs 2",
        {},
        r"--hbp-epochs is given without --hbp-plan or --hbp-corpus; name one of them, or leave "
        r"it out",
    ),
    "plan_for_other_ranks": (
        "--hbp-plan {plan_of_8_ranks}",
        {},
        r"the plan is for 8 ranks, the run has 4 \(world size / \(TP x PP\)\); plan again with "
        r"--ranks 4",
    ),
    "plan_for_another_batch": (
        "--hbp-plan {one_by_one}",
        {},
        r"the plan has 1 micro-batches a step, --global-batch-size gives 2; it must be ranks x "
        r"micro-batches = 4",
    ),
    "br_e05_plan_for_another_document_alignment": (
        "--hbp-plan {padded_plan}",
        {},
        r"the plan aligns documents to \[16, 16\], the run needs \[1, 1\]; plan again",
    ),
    "br_e05_plan_for_another_budget_alignment": (
        f"{PLAN} --tensor-model-parallel-size 2 --sequence-parallel",
        {"WORLD_SIZE": 8},
        r"the plan aligns the token budget to 1, the run needs 2 \(TP and low-precision recipe\)",
    ),
    "br_e05_plan_for_another_recipe": (
        "--hbp-plan {fp8_plan} --fp8-format hybrid --fp8-recipe mxfp8",
        {},
        r"the plan aligns the token budget to 16, the run needs 32 \(TP and low-precision recipe\)",
    ),
    "plan_for_another_corpus": (
        f"{PLAN} --hbp-corpus {{other_corpus}}",
        {},
        r"the plan \S+/plan was made from another corpus than \S+/other \(hash [0-9a-f]{12}, found "
        r"[0-9a-f]{12}\); plan again or name its corpus",
    ),
    "plan_from_lengths_names_no_corpus": (
        "--hbp-plan {lengths_only}",
        {},
        r"the plan \S+ was made from lengths and names no corpus; add --hbp-corpus DIR",
    ),
    "a_flag_against_the_plan": (
        f"{PLAN} --hbp-epochs 2",
        {},
        r"--hbp-epochs 2 contradicts the plan \S+, which has 1; leave the flag out",
    ),
    "a_level_against_the_plan": (
        f"{PLAN} --hbp-level 64:1",
        {},
        r"--hbp-level 64:1 contradicts the plan \S+, which has 64:1 128:2; leave the flag out",
    ),
    "damaged_plan_array": (
        "--hbp-plan {cut_plan}",
        {},
        r"the plan in \S+/cut does not match its hash: a file was cut or edited; make it again",
    ),
    "damaged_plan_document": (
        "--hbp-plan {torn_plan}",
        {},
        r"\S+/torn/plan.json is damaged \(.*\); make it again",
    ),
    "plan_is_not_there": (
        "--hbp-plan {nothing}",
        {},
        r"\S+/nothing holds no plan.json; make the plan with `hbp plan --output",
    ),
    "damaged_corpus": (
        "--hbp-corpus {cut_corpus} --hbp-level 64:1",
        {},
        r"the corpus in \S+/cut_corpus is damaged \(tokens.bin has 10 bytes, not \d+\); remove it",
    ),
    "token_id_beyond_the_vocabulary": (
        "--hbp-corpus {big_ids} --hbp-level 64:1",
        {},
        r"the corpus \S+/big_ids holds token id \d+, the model's vocabulary has 256 rows; use the "
        r"tokenizer that the corpus was prepared with",
    ),
    "overlong_sample": (
        "--hbp-corpus {long_rows} --hbp-level 64:1 --hbp-level 128:2",
        {},
        r"sequence 1 has 129 tokens, but the longest level holds 128; 2 of 3 sequences are "
        r"over-long; "
        r"add a longer level, or use --hbp-overlong drop or --hbp-overlong truncate",
    ),
    "br_h01_sequence_aux_loss": (
        f"{PLAN} {' '.join(flags.moe('seq_aux_loss'))}",
        {},
        r"--moe-router-load-balancing-type seq_aux_loss is not supported with HBP: a rank's S "
        r"tokens "
        r"are many documents",
    ),
    "plan_cache_that_cannot_be_used": (
        f"{CORPUS} --hbp-plan-cache {{corpus}}/corpus.json",
        {},
        r"the plan cache \S+/corpus.json cannot be used \(.*\); name a folder that this user may "
        r"write with --hbp-plan-cache, or make the plan beforehand with `hbp plan`",
    ),
    "the_same_corpus_twice": (
        f"{CORPUS} --hbp-corpus {{corpus}}",
        {},
        r"the corpora \S+/corpus and \S+/corpus hold the same sequences; name one of them, and "
        r"give it an --hbp-source-weight of 2",
    ),
    "corpora_of_other_tokenizers": (
        f"{CORPUS} --hbp-corpus {{big_ids}}",
        {},
        r"the corpora \S+/corpus and \S+/big_ids were made with different tokenizers \(vocabulary "
        r"sizes 250 and 5000\): a token id would mean two things; make \S+/big_ids again with",
    ),
    "too_few_source_weights": (
        f"{CORPUS} --hbp-corpus {{other_corpus}} --hbp-source-weight 2",
        {},
        r"the number of --hbp-source-weight is 1, that of corpora 2 \(\S+/corpus, \S+/other\); "
        r"give one for each, in the order of --hbp-corpus, 0 to leave one out",
    ),
    "negative_source_weight": (
        f"{CORPUS} --hbp-source-weight -1",
        {},
        r"--hbp-source-weight is -1; each must be a finite number of 0 or more",
    ),
    "source_weight_against_the_plan": (
        f"{PLAN} --hbp-source-weight 2",
        {},
        r"--hbp-source-weight 2 contradicts the plan \S+, which has none; leave the flag out",
    ),
    "attention_dropout": (
        f"{PLAN} --attention-dropout 0.1",
        {},
        r"--attention-dropout is 0.1; with HBP it must be 0",
    ),
    "position_embedding": (
        f"{PLAN} --position-embedding-type learned_absolute",
        {},
        r"--position-embedding-type learned_absolute is not supported with HBP; tested models "
        r"use rope",
    ),
    "cpu_needs_gloo": (
        f"{PLAN} --distributed-backend nccl",
        {},
        r"--distributed-backend is nccl; --hbp-device cpu needs gloo",
    ),
    "eval_iters_against_the_validation_corpus": (
        f"{CORPUS} --hbp-valid-corpus {{other_corpus}} --eval-iters 7",
        {},
        r"--eval-iters is 7; the validation corpus takes \d+ evaluation steps, all of it each time",
    ),
    "eval_iters_zero_with_a_validation_corpus": (
        f"{CORPUS} --hbp-valid-corpus {{other_corpus}} --eval-iters 0",
        {},
        r"--eval-iters 0 contradicts --hbp-valid-corpus; leave one of them out",
    ),
}

# of GOOD, those that run as rank 1, alone: nothing of rank 0's is waited for
AS_RANK_1 = ("br_k02 a rank that sees no plan of another's",)

GOOD = {
    "plan": PLAN,
    "plan and its own flags": f"{PLAN} --hbp-level 64:1 --hbp-level 128:2 --hbp-epochs 1",
    "corpus": CORPUS,
    "br_k02 a rank that sees no plan of another's": f"{CORPUS} --hbp-plan-cache {{cache}}",
    "two corpora with weights": f"{CORPUS} --hbp-corpus {{other_corpus}} --hbp-source-weight 2 "
    "--hbp-source-weight 0.5",
    "corpus and fewer iterations": f"{CORPUS} --train-iters 2",
    "qk-norm, no clip": f"{PLAN} --recompute-granularity selective",
    "legacy rotary flag": f"{PLAN} !--position-embedding-type --use-rotary-position-embeddings",
    "validation": f"{CORPUS} --hbp-valid-corpus {{other_corpus}}",
    "overlong dropped": "--hbp-corpus {long_rows} --hbp-level 128:2 --hbp-overlong drop",
    "per-level recompute": "--hbp-plan {dense_plan}",
}
