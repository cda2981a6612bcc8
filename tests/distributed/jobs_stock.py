"""The stock host model, without HBP: one document per forward pass, unpacked, no CP.

Importing this module imports nothing of megatron_hbp. The model is built from the host's own layer
spec of the local backend; only MLA's core attention is ours, because the host's local one cannot be
built for MLA: `PlainAttention`, with an explicit mask.
"""

import hashlib
import sys
from collections.abc import Iterator
from typing import Any

import megatron.core.datasets.utils as dataset_utils
import torch
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model
from megatron.training import get_args
from megatron.training import training as host_training
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.initialize import initialize_megatron
from megatron.training.models.gpt import GPTModelBuilder


class PlainAttention(MegatronModule):
    """softmax(q k^T x scale + mask) v, in float64."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **kwargs: Any) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor,
        **kwargs: Any,
    ) -> torch.Tensor:
        """[S, B, H, D], mask [1, 1, S, S] True where hidden -> [S, B, H x Dv]."""
        q, k, v = (x.double().permute(1, 2, 0, 3) for x in (query, key, value))
        scale = self.softmax_scale or q.shape[-1] ** -0.5
        scores = (q @ k.transpose(-1, -2)) * scale
        weights = scores.masked_fill(attention_mask, float("-inf")).softmax(dim=-1)
        out = (weights @ v).permute(2, 0, 1, 3)
        return out.flatten(start_dim=2).to(query.dtype)


def stock_arguments(argv: list[str], extra_args_provider: Any = None) -> tuple[Any, Any]:
    """The host's arguments and model config; `--hbp-*` flags are taken out of argv."""
    kept, skip = [], False
    for flag in argv:
        if not skip and not flag.startswith("--hbp-"):
            kept.append(flag)
        skip = flag.startswith("--hbp-")
    sys.argv = ["pretrain_gpt", *kept]
    dataset_utils.compile_helpers = lambda: None  # the wheel has the helpers but no Makefile
    args = parse_and_validate_args(extra_args_provider=extra_args_provider)
    model_config = gpt_config_from_args(args)
    if args.multi_latent_attention:
        model_config.transformer_layer_spec = _local_mla_spec
    return args, model_config


def _local_mla_spec(model_config: Any, vp_stage: int | None = None) -> Any:
    config = model_config.transformer
    block = get_gpt_decoder_block_spec(
        config=config,
        use_transformer_engine=False,
        normalization=config.normalization,
        vp_stage=vp_stage,
    )
    for layer in block.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = PlainAttention
    return block


def causal_mask(length: int) -> torch.Tensor:
    """bool [1, 1, length, length]: True where a query may not look."""
    return torch.ones(length, length, dtype=torch.bool).triu(diagonal=1)[None, None]


def token_losses(model: Any, tokens: Any) -> torch.Tensor:
    """float32 [length]: the loss at each position of one document; the last one is meaningless."""
    ids = torch.as_tensor(tokens.astype("int64"))[None]
    return model(
        input_ids=ids,
        position_ids=torch.arange(ids.shape[1])[None],
        attention_mask=causal_mask(ids.shape[1]),
        labels=torch.cat([ids[:, 1:], torch.zeros_like(ids[:, :1])], dim=1),
    ).view(-1)


def train(
    argv: list[str],
    corpus: str,
    steps: list[list[tuple[int, list[float]]]],
    *,
    weights_in: str | None = None,
    weights_out: str | None = None,
    learning_rate: float = 0.0,
) -> dict[str, Any]:
    """Trains documents one at a time, with torch's own AdamW.

    steps: per step (sequence id, weight of the loss at each kept position). A step's loss is the
    sum of weight x token loss. Returns per step the loss (float64), the gradient, its norm, and the
    token losses of each document in order.
    """
    from megatron_hbp.corpus.store import Corpus

    args, model_config = stock_arguments(argv)
    initialize_megatron()
    model_config.finalize()
    model = GPTModelBuilder(model_config).build_model(
        pg_collection=ProcessGroupCollection.use_mpu_process_groups()
    )
    named = dict(model.named_parameters())
    if weights_in is not None:
        given = torch.load(weights_in)
        assert given.keys() == named.keys()
        for name, parameter in named.items():
            parameter.data.copy_(given[name])
    if weights_out is not None:
        torch.save({name: parameter.detach() for name, parameter in named.items()}, weights_out)
    optimizer = torch.optim.AdamW(
        [
            {
                "params": [p for p in named.values() if p.ndim > 1],
                "weight_decay": args.weight_decay,
            },
            {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_eps,
    )
    sequences = Corpus.open(corpus)
    results: dict[str, Any] = {"losses": [], "norms": [], "gradients": [], "token_losses": []}
    for documents in steps:
        optimizer.zero_grad(set_to_none=False)
        total, read = 0.0, []
        for sequence, weights in documents:
            losses = token_losses(model, sequences.tokens(sequence, len(weights)))
            weighted = losses.double() @ torch.tensor(weights, dtype=torch.float64)
            weighted.backward()
            total += weighted.item()
            read.append(losses.detach())
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in named.items()
        }
        norm = torch.stack([g.double().square().sum() for g in gradients.values()]).sum().sqrt()
        results["losses"].append(total)
        results["norms"].append(norm.item())
        results["gradients"].append(gradients)
        results["token_losses"].append(read)
        if learning_rate > 0.0:
            shrink = min(1.0, args.clip_grad / (norm.item() + 1e-6))
            for parameter in named.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(shrink)
            optimizer.step()
    return results


def pretrain(argv: list[str], with_plugin: bool = False) -> dict[str, Any]:
    """The host's own loop on made-up tokens, a forward step without packing.

    with_plugin: register the plugin's flags and ask it to set up, as its entry point does. Returns
    losses, weights after loading and at the end, and a hash of both; or {"error": text}.
    """
    provider = None
    if with_plugin:
        from megatron_hbp.host import pretrain_gpt

        provider = pretrain_gpt.with_arguments(None)
    args, model_config = stock_arguments(argv, provider)
    if with_plugin:
        assert pretrain_gpt.setup(args, model_config) is None
    models, losses, start = [], [], {}
    build, step = host_training.setup_model_and_optimizer, host_training.train_step

    def recorded_build(*args: Any, **kwargs: Any) -> Any:
        built = build(*args, **kwargs)
        models.extend(built[0])
        start.update(_named_weights(models))
        return built

    def recorded_step(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        losses.append(result[0]["lm loss"].item())
        return result

    host_training.setup_model_and_optimizer = recorded_build
    host_training.train_step = recorded_step
    try:
        host_training.pretrain(
            cfg_container=pretrain_cfg_container_from_args(args, model_config),
            train_valid_test_dataset_provider=_made_up_data,
            model_type=ModelType.encoder_or_decoder,
            forward_step_func=_forward_step,
        )
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    weights = _named_weights(models)
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].numpy().tobytes())
    digest.update(repr(losses).encode())
    return {
        "losses": losses,
        "weights_at_start": start,
        "weights": weights,
        "hash": digest.hexdigest(),
    }


def _named_weights(model: list[Any]) -> dict[str, torch.Tensor]:
    return {
        name: parameter.detach().clone()
        for chunk in unwrap_model(model)
        for name, parameter in chunk.named_parameters()
    }


def _made_up_data(num_samples: Any, vp_stage: int | None = None) -> tuple[Any, None, None]:
    return _batches(get_args()), None, None


_made_up_data.is_distributed = True  # type: ignore[attr-defined]


def _batches(args: Any) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + args.rank)
    while True:
        yield torch.randint(0, args.vocab_size, (1, args.seq_length + 1), generator=generator)


def _forward_step(data_iterator: Any, model: Any) -> Any:
    tokens = next(data_iterator)
    length = tokens.shape[1] - 1
    losses = model(
        input_ids=tokens[:, :-1].contiguous(),
        position_ids=torch.arange(length)[None],
        attention_mask=causal_mask(length),
        labels=tokens[:, 1:].contiguous(),
    )

    def loss_function(losses: torch.Tensor) -> Any:
        total = losses.float().sum()
        count = torch.tensor(length, dtype=torch.int)
        return total, count, {"lm loss": torch.stack([total.detach(), count.float()])}

    return losses, loss_function
