"""What is no row of a table: settings that are read together, and blocks and files that are
named. One function for each tool. It adds to what `carry` found."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from toolkit.engines.deepspeed.json_file import JsonFile
from toolkit.foreign import datasets, megatron
from toolkit.foreign.blocks import add_engine, deepspeed_block
from toolkit.foreign.carry import OFF, Carried, ForeignSetting, Found, Settings, number
from toolkit.optimizers.base import OPTIMIZERS

REPORTS = ("wandb", "tensorboard", "mlflow", "trackio")
_PLATEAU = ("factor", "patience")


def _trainer(found: Found, settings: Settings, file: JsonFile) -> None:
    _reports(found, settings.get("report_to"))
    _schedule(found, settings, "lr_scheduler_type")
    _evaluations(found, settings.get("eval_strategy"))
    names = ("deepspeed", "fsdp", "fsdp_config")
    add_engine(found, file, *(settings.get(name) for name in names))
    _optimizer(found)


def _axolotl(found: Found, settings: Settings, file: JsonFile) -> None:
    _schedule(found, settings, "lr_scheduler")
    datasets.axolotl(found, settings)
    share = settings.get("cosine_min_lr_ratio")
    peak = found.values.get("optimizer.learning_rate")
    if share is not None and share.value is not None:
        ratio = number(share.value)
        if peak is None or ratio is None:
            found.problems.append(
                share.problem("a share of the learning rate, which is stated")
            )
        else:
            found.put("schedule.min_learning_rate", peak.value * ratio, share)
    switch, options = settings.get("fsdp"), settings.get("fsdp_config")
    if switch is None or not switch.value:
        switch = options
    if switch is not None and (options is None or isinstance(options.value, Mapping)):
        version = settings.get("fsdp_version")
        stated = {"fsdp_version": version.value if version else 1}
        for name, one in (options.value if options else {}).items():
            stated |= {name: one} if one is not None else {}
        options = replace(options or switch, name="fsdp_config", value=stated)
    add_engine(found, file, settings.get("deepspeed"), switch, options)
    _optimizer(found)


def _llama_factory(found: Found, settings: Settings, file: JsonFile) -> None:
    context = found.context
    pairs = context["stage"] == "dpo"
    orpo = pairs and context["pref_loss"] == "orpo"
    objective = {"pt": "pretrain", "sft": "sft"}.get(
        str(context["stage"]), "orpo" if orpo else "dpo"
    )
    at = settings.get("stage") or ForeignSetting("stage (default)", "sft", str(file.path))
    found.put("training.objective", objective, at)
    if pairs and not orpo and "pref_loss" in settings:
        found.put("dpo.loss", context["pref_loss"], settings["pref_loss"])
    if (beta := settings.get("pref_beta")) is not None and beta.value is not None:
        if pairs:
            found.put(f"{objective}.beta", beta.value, beta)
        else:
            found.drop(beta, f"not in effect: stage is {context['stage']}", changes=False)
    if context["finetuning_type"] == "lora":
        found.defaults["adapter.alpha"] = 2 * found.number("adapter.rank", 8)
    if (pure := settings.get("pure_bf16")) is not None and pure.value is True:
        found.drop(pure, "master weights and optimizer states are in fp32")
    _packing(found, settings, objective)
    datasets.llama_factory(found, settings, file, objective)
    _trainer(found, settings, file)


def _packing(found: Found, settings: Settings, objective: str) -> None:
    packing = settings.get("packing")
    if packing is None or "data.packing" in found.values:
        return
    if packing.value is True and objective != "pretrain":
        found.drop(
            packing, "rows attend to each other there; data.packing: greedy keeps them apart"
        )
    elif packing.value is False and objective == "pretrain":
        found.drop(packing, "documents are concatenated, and cut at equal lengths")


def _accelerate(found: Found, settings: Settings, file: JsonFile) -> None:
    if (config := settings.get("deepspeed_config_file")) is not None and config.value:
        found.merge(deepspeed_block(file, config.name, config.value))


def _reports(found: Found, at: ForeignSetting | None) -> None:
    if at is None or at.value in (None, "none", []):
        return
    stated = at.value if isinstance(at.value, list) else [at.value]
    if wanted := [name for name in REPORTS if name in stated or "all" in stated]:
        found.put("logging.trackers", wanted, at)
    if other := [str(one) for one in stated if one not in (*REPORTS, "all", "none")]:
        what = f"no {', '.join(other)}; there are {', '.join(REPORTS)}"
        found.drop(at, what, changes=False)


def _schedule(found: Found, settings: Settings, name: str) -> None:
    """Options of a schedule. One that is `constant` has no warm-up there."""
    options = settings.get("lr_scheduler_kwargs")
    given = options.value if options is not None else None
    peak = found.values.get("optimizer.learning_rate")
    if options is not None and given and not isinstance(given, Mapping):
        found.problems.append(options.problem("a map of options"))
    for option, value in given.items() if isinstance(given, Mapping) else ():
        assert options is not None
        at = ForeignSetting(f"{options.name}.{option}", value, options.file, options.line)
        rate = number(value)
        if option == "min_lr":
            found.put("schedule.min_learning_rate", value, at)
        elif option == "min_lr_rate" and peak is not None and rate is not None:
            found.put("schedule.min_learning_rate", peak.value * rate, at)
        elif option in _PLATEAU:
            found.put(f"schedule.plateau.{option}", value, at)
        else:
            found.drop(at, "of these options, min_lr is schedule.min_learning_rate")
    if name in settings and settings[name].value == "constant":
        for key in ("schedule.warmup_steps", "schedule.warmup_ratio"):
            found.defaults.pop(key, None)
            if (one := found.values.pop(key, None)) is not None:
                found.drop(one.at, "not in effect: a constant schedule", changes=False)


def _evaluations(found: Found, at: ForeignSetting | None) -> None:
    """Validations at numbers of steps, by default those at which losses are logged."""
    key = "evaluation.every_steps"
    if at is None or at.value in OFF:
        return
    if at.value != "steps":
        found.drop(at, f"{key} is a number of steps", changes=False)
    elif key not in found.values:
        found.put(key, found.number("logging.every_steps", 500), at)


def _optimizer(found: Found) -> None:
    """With an adapter, states of few bits have nothing to save, or no meaning."""
    one = found.values.get("optimizer.name")
    kind = OPTIMIZERS[one.value] if one and one.value in OPTIMIZERS.names else None
    adapted = any(key.startswith("adapter.") for key in (*found.values, *found.defaults))
    if one and kind and kind.no_adapter and adapted:
        plain = OPTIMIZERS.names[0]
        what = f"with {OPTIMIZERS[plain].title}, where this is {kind.title}: {kind.no_adapter}"
        found.values["optimizer.name"] = Carried(plain, one.at, what, (one.value,))


RULES: Mapping[str, Callable[[Found, Settings, JsonFile], None]] = {
    "accelerate": _accelerate,
    "trainer": _trainer,
    "axolotl": _axolotl,
    "llama_factory": _llama_factory,
    "megatron_lm": megatron.rules,
}
