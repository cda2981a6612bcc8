"""The host's flags that HBP refuses altogether, each with the reason and, where there is one, a way
out. checks.py reads the table.
"""

# (attribute, value when off, flag, reason and way out)
REFUSED = (
    ("mtp_num_layers", None, "--mtp-num-layers", "multi-token prediction rebuilds stock layers"),
    ("full_validation", False, "--full-validation", "--hbp-valid-corpus is evaluated whole anyway"),
    ("multiple_validation_sets", False, "--multiple-validation-sets", "use one --hbp-valid-corpus"),
    ("sft", False, "--sft", "HBP brings its own SFT data; name it with --hbp-corpus"),
    (
        "hybrid_context_parallel",
        False,
        "--hybrid-context-parallel",
        "HBP switches the CP size itself; name CP sizes in --hbp-level",
    ),
    (
        "cuda_graph_impl",
        "none",
        "--cuda-graph-impl",
        "a graph fixes the pack's boundaries and group",
    ),
    ("enable_cuda_graph", False, "--enable-cuda-graph", "a graph fixes the pack's boundaries"),
    ("external_cuda_graph", False, "--external-cuda-graph", "a graph fixes the pack's boundaries"),
    (
        "overlap_moe_expert_parallel_comm",
        False,
        "--overlap-moe-expert-parallel-comm",
        "its schedule rebuilds the layers' forward",
    ),
    ("use_megatron_fsdp", False, "--use-megatron-fsdp", "not tested with HBP"),
    ("use_torch_fsdp2", False, "--use-torch-fsdp2", "not tested with HBP"),
    ("perform_rl_step", False, "--perform-rl-step", "HBP plans fine-tuning data only"),
    ("rampup_batch_size", None, "--rampup-batch-size", "a plan has whole steps of one size"),
    ("step_batch_size_schedule", None, "--step-batch-size-schedule", "a plan has one batch size"),
    ("train_samples", None, "--train-samples", "use --hbp-epochs or --train-iters"),
    ("phase_transition_iterations", None, "--phase-transition-iterations", "a plan has one phase"),
    ("spec", None, "--spec", "HBP brings the layer spec"),
    ("experimental_attention_variant", None, "--experimental-attention-variant", "not tested"),
    ("heterogeneous_layers_config_path", None, "--heterogeneous-layers-config-path", "not tested"),
    (
        "hybrid_layer_pattern",
        None,
        "--hybrid-layer-pattern",
        "state-space layers are not supported",
    ),
    ("moe_expert_capacity_factor", None, "--moe-expert-capacity-factor", "padding would take room"),
    (
        "log_max_attention_logit",
        False,
        "--log-max-attention-logit",
        "a rank sees the logits of some heads only",
    ),
    (
        "modelopt_enabled",
        False,
        "--modelopt-enabled",
        "ModelOpt's builder takes no layer spec of ours",
    ),
    ("logits_load_dir", None, "--logits-load-dir", "the loss is plain cross entropy"),
    (
        "config_logger_dir",
        "",
        "--config-logger-dir",
        "the host cannot write the process groups that models are built with",
    ),
    ("qk_clip", False, "--qk-clip", "it reads attention logits that HBP's attention does not keep"),
    (
        "override_ckpt_iteration",
        None,
        "--override-ckpt-iteration",
        "it would train samples twice or skip them",
    ),
    ("inprocess_restart", False, "--inprocess-restart", "not tested with HBP"),
    (
        "yaml_cfg",
        None,
        "--yaml-cfg",
        "the file would hide the --hbp-* flags; name flags one by one",
    ),
)
