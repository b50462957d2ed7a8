"""From a recipe to a loop that stands before its next step."""

from collections.abc import Callable

import torch

from workhorse import __version__
from workhorse.checkpoints import RunDirectory, empty_decoder, load_weights, weights_of
from workhorse.checkpoints.stored import open_stored
from workhorse.data import Batches, Dataset, prepare, prepare_tokenizer
from workhorse.devices import training_dtype
from workhorse.errors import WorkhorseError
from workhorse.nn import Decoder
from workhorse.tokenizers import Tokenizer
from workhorse.train.balance import Balancer
from workhorse.train.loop import Loop, Store
from workhorse.train.metrics import Event, MetricsFile
from workhorse.train.optimizers import build_optimizer
from workhorse.train.random_state import seed_everything
from workhorse.train.recipe import Recipe
from workhorse.train.resume import check_same_run
from workhorse.train.samples import Sampler
from workhorse.train.speed import flops_per_token, peak_flops
from workhorse.train.step import (
    LossOfBatch,
    LossScale,
    Precision,
    TrainingStep,
    checkpoint_activations,
)
from workhorse.train.trackers import open_tracker
from workhorse.train.validation import Validator

Listener = Callable[[Event], None]


def assemble(
    recipe: Recipe, run: RunDirectory, device: torch.device, on_event: Listener, store: Store
) -> Loop:
    """Tokenizer, data, model and optimizer, fresh or from the newest whole checkpoint."""
    config = recipe.train
    if config.threads:
        torch.set_num_threads(config.threads)
    listener = _with_trackers(recipe, run, on_event)
    tokenizer = _tokenizer(recipe, run)
    dataset = prepare(
        recipe.data,
        tokenizer,
        run.data_folder,
        progress=lambda done, total: on_event({"kind": "data", "done": done, "total": total}),
    )
    batches = Batches(
        dataset.train,
        seq_len=config.seq_len,
        batch_size=config.batch_size,
        seed=config.seed,
        packing=recipe.data.packing,
    )
    decoder_config = recipe.decoder_config(tokenizer.vocab_size)
    constants = {
        "config": decoder_config.to_dict(),
        "tokenizer": tokenizer.fingerprint,
        "data": dataset.fingerprint,
        "versions": {"workhorse": __version__, "torch": torch.__version__},
    }
    checkpoint = store.newest(lambda line: on_event({"kind": "notice", "message": line}))
    if checkpoint is not None:
        check_same_run(checkpoint, constants)
    run.save_config(decoder_config)
    seed_everything(config.seed)
    if checkpoint is not None:
        decoder = empty_decoder(decoder_config, config.kernel, device, torch.float32)
        load_weights(decoder, checkpoint.model)
    else:
        decoder = decoder_config.build(config.kernel, device=device)
        if recipe.init is not None:
            _start_from(recipe.init, decoder)
    step, validator = _step_and_validator(recipe, decoder, device, dataset)
    loop = Loop(
        config=config,
        step=step,
        weights=lambda: weights_of(decoder),
        batches=batches,
        validator=validator,
        sample=Sampler(decoder, tokenizer, config.samples) if config.samples else None,
        store=store,
        metrics=MetricsFile(run.metrics_file, checkpoint.step if checkpoint else 0),
        on_event=listener,
        constants=constants,
        flops_per_token=flops_per_token(decoder, config.seq_len),
        peak_flops=peak_flops(device, step.precision.dtype),
    )
    if checkpoint is not None:
        loop.restore(checkpoint)
    loop.tell(
        "start",
        name=recipe.name,
        device=_name_of(device),
        threads=torch.get_num_threads(),
        parameters=sum(parameter.numel() for parameter in decoder.parameters()),
        steps=config.steps,
        tokens_per_step=config.tokens_per_step,
        train_tokens=dataset.train.n_tokens,
        flops_per_token=loop.flops_per_token,
        peak_flops=loop.peak_flops,
        versions=constants["versions"],
    )
    return loop


def _start_from(init: str, decoder: Decoder) -> None:
    """Give a decoder the weights of a trained one."""
    trained = open_stored(init).load_decoder(dtype=torch.float32)
    try:
        load_weights(decoder, weights_of(trained))
    except WorkhorseError as error:
        raise WorkhorseError(f"init={init} has other weights than model makes: {error}") from None


def _tokenizer(recipe: Recipe, run: RunDirectory) -> Tokenizer:
    """The run's tokenizer, made on the recipe's training text if it is not there yet."""
    if not run.tokenizer_folder.exists():
        run.save_tokenizer(prepare_tokenizer(recipe.tokenizer, recipe.data, run.data_folder))
    return run.tokenizer()


def _step_and_validator(
    recipe: Recipe, decoder: Decoder, device: torch.device, dataset: Dataset
) -> tuple[TrainingStep, Validator | None]:
    """Both run the same module, so that it is compiled once."""
    config = recipe.train
    precision = Precision(device, training_dtype(config.dtype, device))
    if config.activation_checkpointing:
        checkpoint_activations(decoder)
    module = LossOfBatch(decoder, config.z_loss).train()
    if config.compile:
        module.compile()
    rows = config.micro_batch_size or config.batch_size
    step = TrainingStep(
        module,
        build_optimizer(decoder, config.optimizer),
        device,
        precision=precision,
        scale=LossScale(enabled=config.dtype == "float16"),
        micro_batch_size=rows,
        grad_clip=config.grad_clip,
        balancer=Balancer(decoder, weight=config.balance_loss, rate=config.balance_rate),
    )
    if dataset.validation is None:
        return step, None
    validator = Validator(
        module,
        dataset.validation,
        device,
        precision=precision,
        seq_len=config.seq_len,
        batch_size=rows,
        packing=recipe.data.packing,
    )
    return step, validator


def _with_trackers(recipe: Recipe, run: RunDirectory, on_event: Listener) -> Listener:
    trackers = [
        open_tracker(name, recipe.name, recipe.to_dict(), run.path)
        for name in recipe.train.trackers
    ]

    def tell_all(event: Event) -> None:
        on_event(event)
        for track in trackers:
            track(event)

    return tell_all


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
