"""From model folders to a running worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TypedDict, Unpack

import structlog
import torch

from gateway import kernels, presets
from gateway.ahead import Ahead
from gateway.cache import BlockPool, num_blocks_for
from gateway.config import Config, ConfigError
from gateway.core import MIDDLES, Tier
from gateway.costs import SIZES, costs_of
from gateway.distance import Distance
from gateway.engine import Engine
from gateway.engines.connect import CANARY
from gateway.engines.elsewhere import Elsewhere
from gateway.engines.meet import meet
from gateway.family import reason_for_fallback
from gateway.int8_decoder import Int8Decoder
from gateway.load import CostTable, Load
from gateway.local import local_tiers
from gateway.lookup import AnswerStore
from gateway.models import CausalLM, Quantize
from gateway.prefix import PrefixCache
from gateway.request import Served
from gateway.scheduler import Scheduler
from gateway.servable import read_config
from gateway.static_decoder import StaticDecoder
from gateway.store import cache_dir, model_hash
from gateway.text import Tokenizer
from gateway.tier import Scorer
from gateway.worker import Observer, Worker

log = structlog.get_logger("gateway")

PAGE = 256
"""Positions in a KV block where rows are paged; else a block is a whole slot, read without a copy."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Models in memory with their KV caches: what engines are made from, one at a time.

    elsewhere: the large model, where it runs on an engine that is not ours.
    """

    models: dict[Tier, CausalLM]
    tokenizer: Tokenizer
    num_blocks: int
    block_size: int
    served: Served
    costs: dict[Tier, CostTable] | None
    elsewhere: Elsewhere | None = None

    def tiers(self) -> dict[Tier, Scorer]:
        """The models here as tiers; a small one on a GPU drafts ahead."""
        tiers: dict[Tier, Scorer] = {**local_tiers(self.models)}
        small = self.models[Tier.SMALL]
        if isinstance(small.decoder, StaticDecoder):
            tiers[Tier.SMALL] = Ahead(small, tiers[Tier.SMALL].vocab_size)
        return tiers

    def engine(
        self, scheduler: Scheduler, max_rows: int, max_model_len: int, **options: Unpack[EngineOptions]
    ) -> Engine:
        """An engine over these models; options as for Engine."""
        pool = BlockPool(self.num_blocks, self.block_size)
        return Engine(
            self.tiers(),
            self.tokenizer,
            pool,
            scheduler,
            max_rows=max_rows,
            max_model_len=max_model_len,
            distant={} if self.elsewhere is None else {Tier.LARGE: self.elsewhere},
            **options,
        )

    def load(self, *, ride_along: bool | None = False) -> Load | None:
        """What caps drafts, by the measured costs; None where they were not measured."""
        if self.costs is None:
            return None
        # Nothing rides along to a model elsewhere.
        return Load(self.costs, ride_along=ride_along) if self.elsewhere is None else Distance(self.costs)

    def close(self) -> None:
        """Let go of an engine elsewhere."""
        if self.elsewhere is not None:
            self.elsewhere.close()


class EngineOptions(TypedDict, total=False):
    """Engine's optional parts."""

    load: Load | None
    answers: AnswerStore | None
    prefixes: PrefixCache | None
    degrades: bool
    draft_ahead: bool
    ride_along: bool | None


def load_worker(config: Config, observers: Sequence[Observer]) -> Worker:
    """The pair that the config names, fetched and converted where it is missing, behind a running worker."""
    load = load_pair if config.remote.engine is None else load_small
    loaded = load(config, timed=_adapts(config))
    check_calibrated(config, loaded.served)
    check_probes(config, loaded.models[Tier.SMALL].hidden_size)
    engine = config.engine
    worker = Worker(
        loaded.engine(
            Scheduler(engine.large_wait_ms / 1000, engine.prefill_chunk),
            engine.max_rows,
            engine.max_model_len,
            load=loaded.load(ride_along=engine.ride_along),
            degrades=config.remote.on_large_failure == "degrade",
            draft_ahead=config.remote.draft_ahead,
            ride_along=engine.ride_along,
            answers=_answers(config, loaded.tokenizer),
            prefixes=PrefixCache(engine.prefix_slots),
        ),
        loaded.served,
        observers,
        max_queue=engine.max_queue,
    )
    worker.start()
    return worker


def load_pair(config: Config, *, timed: bool) -> Loaded:
    """Load the models, make their caches, time passes if `timed`; raises ConfigError naming the key."""
    check_device(config)
    pair = presets.resolve(config.models)
    dtype = _dtype(config)
    middles = dict(zip(MIDDLES, pair.middles, strict=False))
    folders = {Tier.SMALL: pair.small, **middles, Tier.LARGE: pair.large}
    lean = {tier: reason_for_fallback(read_config(folder)) is None for tier, folder in folders.items()}
    quantize = quantization(config, dtype, lean)
    models = {tier: _load(config, tier, folders[tier], dtype, quantize[tier]) for tier in folders}
    served = Served(
        small_model=_name(config, pair.small),
        large_model=_name(config, pair.large),
        small_hash=model_hash(pair.small),
        large_hash=model_hash(pair.large),
        numerics=numerics(config, dtype, quantize),
        version=version("tokentape"),
        router_hash=_router_hash(config),
        middle_models=tuple(_name(config, folder) for folder in pair.middles),
        middle_hashes=tuple(model_hash(folder) for folder in pair.middles),
    )
    return hold(config, models, Tokenizer.load(pair.large), served, timed=timed)


def load_small(config: Config, *, timed: bool) -> Loaded:
    """Load the small model, meet the engine that serves the large one; raises ConfigError naming the key."""
    check_device(config)
    folder, dtype = presets.resolve_small(config.models), _dtype(config)
    lean = reason_for_fallback(read_config(folder)) is None
    quantize = quantization(config, dtype, {Tier.SMALL: lean, Tier.LARGE: False})
    tokenizer = Tokenizer.load(folder)
    large, meeting = meet(config, tokenizer)
    try:
        small = _load(config, Tier.SMALL, folder, dtype, quantize[Tier.SMALL])
        served = Served(
            small_model=_name(config, folder),
            large_model=f"{meeting.kind}/{meeting.model}",
            small_hash=model_hash(folder),
            large_hash=meeting.hash,
            numerics=f"{config.models.device}/{dtype}/{quantize[Tier.SMALL]}+{meeting.kind}",
            version=version("tokentape"),
            router_hash=_router_hash(config),
        )
        return hold(config, {Tier.SMALL: small}, tokenizer, served, timed=timed, large=large)
    except BaseException:
        large.close()
        raise


def _dtype(config: Config) -> str:
    return config.models.dtype or ("float32" if _is_tiny(config) else "bfloat16")


def _load(config: Config, tier: Tier, folder: Path, dtype: str, quantize: Quantize) -> CausalLM:
    device = config.models.device
    try:
        return CausalLM.load(folder, device=device, dtype=getattr(torch, dtype), quantize=quantize)
    except ValueError as error:
        raise ConfigError(f"models.{_key(tier)}: {folder} cannot be served: {error}") from error


def check_device(config: Config) -> None:
    """Raise ConfigError where the device is not there."""
    if config.models.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("models.device: there is no CUDA device")


def numerics(config: Config, dtype: str, quantize: Mapping[Tier, Quantize]) -> str:
    """The name of the arithmetic, for the tape."""
    return f"{config.models.device}/{dtype}/{'+'.join(quantize.values())}"


def hold(
    config: Config,
    models: Mapping[Tier, CausalLM],
    tokenizer: Tokenizer,
    served: Served,
    *,
    timed: bool,
    large: Elsewhere | None = None,
) -> Loaded:
    """Models with their caches made; their passes timed if `timed`. Raises ConfigError naming the key."""
    engine = config.engine
    for tier, model in models.items():
        most = model.decoder.max_positions
        if most is not None and engine.max_model_len > most:
            key = f"models.{_key(tier)}"
            raise ConfigError(
                f"engine.max_model_len: {engine.max_model_len} is beyond {key}'s {most} positions"
            )
    int8 = all(isinstance(model.decoder, Int8Decoder) for model in models.values())
    paged = int8 or config.models.device == "cuda"
    block_size = min(PAGE, engine.max_model_len) if paged else engine.max_model_len
    try:
        num_blocks = num_blocks_for(
            int(engine.kv_memory_gib * 2**30),
            block_size,
            [model.cache_shape for model in models.values()],
            most=engine.max_rows * -(-engine.max_model_len // block_size),
        )
    except MemoryError as error:
        raise ConfigError(str(error)) from None
    for model in models.values():
        model.allocate(num_blocks, block_size)
    costs = None
    if timed:
        hashes = " ".join((served.small_hash, *served.middle_hashes, served.large_hash))
        built = kernels.build_name() if config.models.device == "cpu" else ""
        identity = f"{hashes} {served.numerics} {built}"
        longest = min(SIZES[-1], engine.max_model_len, num_blocks * block_size)
        blocks = tuple(range(-(-longest // block_size)))
        costs = costs_of(models, blocks, longest, identity, cache_dir())
        if large is not None:
            costs[Tier.LARGE] = large.costs(tokenizer.encode(CANARY))
    return Loaded(dict(models), tokenizer, num_blocks, block_size, served, costs, large)


def check_pair(config: Config) -> None:
    """Raise ConfigError where more than a pair is named and only a pair can be measured."""
    if config.models.middle:
        raise ConfigError("models.middle: calibrate, evaluate and bench measure a pair; leave it out")


def check_calibrated(config: Config, served: Served) -> None:
    """Raise ConfigError where a policy was calibrated on other models than those served."""
    for name, calibration in config.calibration.items():
        if served.middle_hashes:
            raise ConfigError(
                f"calibration.{name}: the guarantee is of a pair, models.middle names more; delete "
                f"[calibration.{name}] or models.middle"
            )
        for key in ("small_hash", "large_hash"):
            was, now = getattr(calibration, key), getattr(served, key)
            if was != now:
                raise ConfigError(
                    f"calibration.{name}.{key}: policy {name} was calibrated on other models "
                    f"({was[:12]}, served is {now[:12]}); calibrate again, or delete [calibration.{name}]"
                )
        policy_hash = config.policies[name].hash
        if calibration.policy_hash != policy_hash or calibration.numerics != served.numerics:
            # Still a policy one may serve, but no longer the one that was tested.
            log.warning(
                "guarantee_void",
                policy=name,
                calibrated={"policy_hash": calibration.policy_hash, "numerics": calibration.numerics},
                served={"policy_hash": policy_hash, "numerics": served.numerics},
            )


def check_probes(config: Config, hidden_size: int) -> None:
    """Raise ConfigError where a router reads hidden states of another width than the small model's."""
    for name, policy in config.policies.items():
        width = len(policy.router.probe) if policy.router is not None else 0
        if width not in (0, hidden_size):
            raise ConfigError(
                f"policy.{name}.router: it reads {width} hidden values, the small model has {hidden_size}"
            )


def _router_hash(config: Config) -> str | None:
    router = config.policies["stable"].router
    return None if router is None else router.hash


def _is_tiny(config: Config) -> bool:
    return config.models.preset == "tiny"


def _adapts(config: Config) -> bool:
    adapt = config.engine.adapt
    return not _is_tiny(config) if adapt is None else adapt


def quantization(config: Config, dtype: str, lean: Mapping[Tier, bool]) -> dict[Tier, Quantize]:
    """What was asked for, or by default int8 on a CPU that can run it, and int4 for the preset's small model,
    which agrees with its large one no less often then; raises ConfigError.

    lean: whether our own forward runs the tier's model.
    """
    models = config.models
    by_default = models.device == "cpu" and dtype == "bfloat16" and not _is_tiny(config)
    chosen: dict[Tier, Quantize] = {}
    middles = [(tier, models.middle_quantize) for tier, _ in zip(MIDDLES, models.middle, strict=False)]
    for tier, asked in ((Tier.SMALL, models.small_quantize), *middles, (Tier.LARGE, models.large_quantize)):
        four = tier is Tier.SMALL and models.small is None and by_default
        wanted = asked or ("int4" if four else "int8" if by_default else "none")
        able = wanted == "none" or (lean[tier] and models.device == "cpu" and kernels.available())
        if asked is not None and not able:
            needs = "a CPU and a C++ compiler at first start" if lean[tier] else "a family our forward knows"
            raise ConfigError(f"models.{_key(tier)}_quantize: {asked} needs {needs}")
        chosen[tier] = wanted if able else "none"
    log.info("quantization", **chosen)
    return chosen


def _answers(config: Config, tokenizer: Tokenizer) -> AnswerStore | None:
    """Earlier answers and the corpus to look tokens up in; None where neither is wanted."""
    engine = config.engine
    if not engine.lookup_history_tokens and engine.lookup_corpus is None:
        return None
    corpus: list[int] = []
    if engine.lookup_corpus is not None:
        try:
            text = Path(engine.lookup_corpus).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"engine.lookup_corpus: {error}") from None
        corpus = tokenizer.encode(text, add_special_tokens=False)
    return AnswerStore(engine.lookup_history_tokens, corpus)


def _name(config: Config, folder: Path) -> str:
    """The model's name for the tape: its own folder's, which says more than a cache path."""
    return f"{config.models.preset}/{folder.name}" if config.models.preset else folder.name


def _key(tier: Tier) -> str:
    """The key of [models] that names a tier's model."""
    return "middle" if tier in MIDDLES else tier.value
