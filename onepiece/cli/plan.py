"""``onepiece plan``: how many instances of each stage, from profiles, before anything is bought or moved.

The numbers are those of the capacity model (docs/explanation/capacity.md), no measurement of this set.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import evolve, frozen

from onepiece.cli.columns import bytes_text, columns, seconds_text
from onepiece.core.capacity import CapacityModel, Demand
from onepiece.core.planning import (
    WORKERS_MAX,
    Plan,
    monolithic,
    plan_for_devices,
    plan_for_rate,
    scaled_seconds,
)
from onepiece.core.service_times import StageProfile
from onepiece.errors import ConfigError
from onepiece.profiles import check_stage_bounds, model_of, read_profile

_GIB: Final = 1 << 30
RATE_MIN: Final = 1e-9
RATE_MAX: Final = 1e9
_FACTOR_MAX: Final = 1e6
RATE_FORM: Final = "a number, or WORKFLOW=NUMBER or WORKFLOW/SIZE_CLASS=NUMBER, in requests a second"
CHANGES: Final = (
    "gpus=N, rate=xFACTOR, p95=SECONDS, STAGE.seconds=xFACTOR, STAGE.devices=N, STAGE.concurrency=N, "
    "STAGE.batch=N; several with commas"
)


@frozen
class Question:
    """What is to be planned."""

    model: CapacityModel
    demands: tuple[Demand, ...]
    has_rate: bool
    """Else the rates are a mix, and the highest rate of it is asked for."""
    gpus: int | None
    p95_seconds: float | None
    utilisation_max: float

    def answer(self) -> tuple[Plan, str]:
        """The plan, and what limits it; raises ``ConfigError``."""
        if not self.has_rate:
            assert self.gpus is not None
            plan = plan_for_devices(
                self.model, self.demands, self.gpus, self.p95_seconds, self.utilisation_max
            )
            return plan, _limit_of(plan, self.gpus, self.p95_seconds)
        plan = plan_for_rate(self.model, self.demands, self.p95_seconds, self.utilisation_max)
        needed = self.model.devices(plan.instances)
        if self.gpus is not None and needed > self.gpus:
            less = evolve(self, has_rate=False)
            smaller, _ = less.answer()
            why = f"{self.gpus} GPUs: {plan.rate:.4g} requests/s would need {needed}"
            return smaller, why
        return plan, _limit_of(plan, None, self.p95_seconds)


def run(
    *,
    profiles: Sequence[str],
    rates: Sequence[str],
    mixes: Sequence[str],
    gpus: int | None,
    p95_seconds: float | None,
    utilisation_max: float,
    variability: float,
    gpu_memory_gib: float | None,
    price: float | None,
    what_if: Sequence[str],
    as_json: bool,
) -> None:
    """Plan, and print the plan, the monolithic alternative, and what would be if.

    Raises:
        ConfigError: A file or an argument is wrong, or what is asked for is out of reach.
    """
    question = _question(profiles, rates, mixes, gpus, p95_seconds, utilisation_max, variability)
    columns_of = {"staged": question, "monolithic": evolve(question, model=monolithic(question.model))}
    columns_of |= {change: _changed(question, change) for change in what_if}
    answers = {name: _answered(each) for name, each in columns_of.items()}
    if isinstance(answers["staged"], ConfigError):
        raise answers["staged"]
    if as_json:
        print(json.dumps({name: _plain(each, price) for name, each in answers.items()}, indent=1))
        return
    plan, _ = answers["staged"]
    print(_stage_table(plan), end="\n\n")
    print(_comparison(answers, price, gpu_memory_gib))


Answer = tuple[Plan, str] | ConfigError


def _answered(question: Question) -> Answer:
    try:
        return question.answer()
    except ConfigError as error:
        return error


def _question(
    profiles: Sequence[str],
    rates: Sequence[str],
    mixes: Sequence[str],
    gpus: int | None,
    p95_seconds: float | None,
    utilisation_max: float,
    variability: float,
) -> Question:
    _check_range("--utilisation", utilisation_max, 0.001, 1)
    _check_range("--gpus", gpus, 0, WORKERS_MAX)
    if rates and mixes:
        raise ConfigError("give --rate or --mix, not both: a mix has the rate that --gpus bear")
    if not rates and gpus is None:
        raise ConfigError("give --rate for the GPUs that it needs, or --gpus for the rate that they bear")
    model = model_of(tuple(read_profile(Path(path)) for path in profiles))
    texts = rates or mixes or [f"{name}=1" for name in model.workflows]
    demands = tuple(demand_of(model, text, variability) for text in texts)
    return Question(model, demands, bool(rates), gpus, p95_seconds, utilisation_max)


def _check_range(option: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low < value <= high:
        raise ConfigError(f"{option} is {value:g}; give a number above {low:g} and at most {high:.10g}")


def demand_of(model: CapacityModel, text: str, variability: float) -> Demand:
    """``2``, ``video=2`` or ``video/480p=2``; what is left out must be the only one there is.

    Raises:
        ConfigError: It is of no such form, or the model does not know it.
    """
    head, _, number = text.rpartition("=")
    try:
        rate = float(number)
    except ValueError:
        rate = -1.0
    if rate and not RATE_MIN <= rate <= RATE_MAX:
        raise ConfigError(f"{text!r} is no rate; give {RATE_FORM}: 0, or from {RATE_MIN:g} to {RATE_MAX:g}")
    workflow, _, size_class = head.partition("/")
    if not workflow:
        workflow = _only("workflow", sorted(model.workflows), f"--rate WORKFLOW={number}")
    shape = model.shape(workflow)
    if not size_class:
        known = set.intersection(*(set(model.stages[stage].size_classes) for stage in shape.visits))
        size_class = _only("size class", sorted(known), f"--rate {workflow}/SIZE_CLASS={number}")
    return Demand(workflow, rate, size_class, variability)


def _only(what: str, names: Sequence[str], form: str) -> str:
    if len(names) != 1:
        known = ", ".join(map(repr, names)) or "none that all stages were measured in"
        raise ConfigError(f"which {what}? There are: {known}; write {form}")
    return names[0]


# --- what if


def _changed(question: Question, text: str) -> Question:
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals:
            raise ConfigError(f"--what-if {part.strip()!r} is no change; give some of {CHANGES}")
        question = _with_change(question, name, value)
    return question


def _with_change(question: Question, name: str, value: str) -> Question:
    stage, dot, what = name.rpartition(".")
    if dot:
        return _with_stage(question, stage, what, value)
    match name:
        case "gpus":
            gpus = _whole(name, value)
            _check_range("--what-if gpus", gpus, 0, WORKERS_MAX)
            return evolve(question, gpus=gpus)
        case "p95":
            return evolve(question, p95_seconds=_number(name, value))
        case "rate":
            factor = _factor(name, value)
            demands = tuple(evolve(d, rate=d.rate * factor) for d in question.demands)
            if any(d.rate and not RATE_MIN <= d.rate <= RATE_MAX for d in demands):
                raise ConfigError(f"--what-if rate={value[:40]}: no rate from {RATE_MIN:g} to {RATE_MAX:g}")
            return evolve(question, demands=demands)
        case _:
            raise ConfigError(f"--what-if has no {name!r}; give some of {CHANGES}")


def _with_stage(question: Question, stage: str, what: str, value: str) -> Question:
    model = question.model
    keys = [key for key in model.stages if stage in {key, key.rpartition(":")[2]}]
    if len(keys) != 1:
        raise ConfigError(f"--what-if: {stage!r} is none of the stages {', '.join(sorted(model.stages))}")
    makers: Mapping[str, Callable[[StageProfile], StageProfile]] = {
        "seconds": lambda each: scaled_seconds(each, _factor(what, value)),
        "devices": lambda each: each.on(_whole(what, value)),
        "concurrency": lambda each: evolve(each, concurrency=_whole(what, value)),
        "batch": lambda each: evolve(each, batch_max=_whole(what, value)),
    }
    if what not in makers:
        raise ConfigError(f"--what-if: a stage has no {what!r}; give some of {CHANGES}")
    changed = makers[what](model.stages[keys[0]])
    check_stage_bounds(changed)
    stages = {**model.stages, keys[0]: changed}
    return evolve(question, model=CapacityModel(stages, model.workflows))


def _whole(name: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and int(value[:9]) > 0):
        raise ConfigError(f"--what-if {name}={value[:40]}: give a whole number above 0")
    return int(value[:9])


def _factor(name: str, value: str) -> float:
    if not value.startswith("x"):
        raise ConfigError(f"--what-if {name}={value[:40]}: give a factor, as {name}=x2 for twice as much")
    return _number(name, value[1:])


def _number(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 1 / _FACTOR_MAX <= number <= _FACTOR_MAX:
        raise ConfigError(
            f"--what-if {name}={value[:40]}: give a number from {1 / _FACTOR_MAX:g} to {_FACTOR_MAX:g}"
        )
    return number


# --- showing


def _limit_of(plan: Plan, gpus: int | None, p95_seconds: float | None) -> str:
    stage = plan.bound.stage
    used = plan.utilisation[stage]
    first = f"{stage} is full at {plan.bound.rate:.4g} requests/s (now {used:.0%} busy)"
    if gpus is not None and p95_seconds is not None and plan.p95_seconds > 0.99 * p95_seconds:
        return f"the P95; {first}"
    return first


def _stage_table(plan: Plan) -> str:
    used = plan.utilisation
    rows = []
    for stage, count in plan.instances.items():
        profile = plan.model.stages[stage]
        kind = profile.kind.value if profile.devices == 1 else f"{profile.devices} {profile.kind.value}s"
        rows.append(
            (stage, str(count), kind, bytes_text(profile.memory_bytes), f"{used.get(stage, 0.0):.0%}")
        )
    return columns(("stage", "instances", "each on", "memory", "busy"), rows)


def _comparison(answers: Mapping[str, Answer], price: float | None, gpu_memory_gib: float | None) -> str:
    rows: dict[str, list[str]] = {}
    notes: list[str] = []
    for name, answer in answers.items():
        if isinstance(answer, ConfigError):
            notes.append(f"{name}: {answer.message}")
            for cells in rows.values():
                cells.append("-")
            continue
        plan, limit = answer
        for title, text in _facts(plan, price).items():
            rows.setdefault(title, []).append(text)
        notes.append(f"{name}: {limit}")
        notes += [f"{name}: {each}" for each in _too_large(plan, gpu_memory_gib)]
    table = columns(["", *answers], [[title, *cells] for title, cells in rows.items()])
    return "\n".join([table, "", *notes])


def _facts(plan: Plan, price: float | None) -> dict[str, str]:
    unit = "GPU" if plan.model.devices(plan.instances) else "processor instance"
    facts = {"rate, requests/s": f"{plan.rate:.4g}", f"{unit}s": str(plan.devices)}
    for latency in plan.latencies:
        name = f"{latency.workflow}/{latency.size_class}" if latency.size_class else latency.workflow
        facts[f"{name}: unloaded"] = seconds_text(latency.unloaded_seconds)
        facts[f"{name}: mean"] = _maybe(latency.mean_seconds)
        facts[f"{name}: P95"] = _maybe(latency.p95_seconds)
    facts[f"{unit} seconds/request"] = f"{plan.device_seconds:.4g}"
    if price is not None:
        facts["cost of 1000 requests"] = f"{plan.device_seconds * price * 1000 / 3600:.4g}"
    largest = max(plan.model.stages[stage].memory_bytes for stage in plan.instances)
    facts["largest memory on a device"] = bytes_text(largest)
    return facts


def _maybe(seconds: float) -> str:
    return seconds_text(seconds) if math.isfinite(seconds) else "without bound"


def _too_large(plan: Plan, gpu_memory_gib: float | None) -> list[str]:
    if gpu_memory_gib is None:
        return []
    return [
        f"{stage} needs {bytes_text(plan.model.stages[stage].memory_bytes)}, which a GPU of "
        f"{gpu_memory_gib:g} GiB does not have: it would have to load its weights anew for each request"
        for stage in plan.instances
        if plan.model.stages[stage].memory_bytes > gpu_memory_gib * _GIB
    ]


def _plain(answer: Answer, price: float | None) -> dict[str, Any]:
    if isinstance(answer, ConfigError):
        return {"error": answer.message}
    plan, limit = answer
    found: dict[str, Any] = {
        "rate": plan.rate,
        "devices": plan.devices,
        "device_seconds_per_request": plan.device_seconds,
        "limit": limit,
        "bound": {"rate": plan.bound.rate, "stage": plan.bound.stage},
        "stages": {
            stage: {
                "instances": count,
                "devices_each": plan.model.stages[stage].devices,
                "memory_bytes": plan.model.stages[stage].memory_bytes,
                "utilisation": plan.utilisation.get(stage, 0.0),
            }
            for stage, count in plan.instances.items()
        },
        "latencies": [
            {
                "workflow": each.workflow,
                "size_class": each.size_class,
                "mean_seconds": each.mean_seconds if math.isfinite(each.mean_seconds) else None,
                "p95_seconds": each.p95_seconds if math.isfinite(each.p95_seconds) else None,
                "unloaded_seconds": each.unloaded_seconds,
            }
            for each in plan.latencies
        ],
    }
    if price is not None:
        found["cost_of_1000_requests"] = plan.device_seconds * price * 1000 / 3600
    return found
