"""What `lm plan` does with its arguments, but for the ladder, which `lm.sweep.propose` writes."""

import argparse
import dataclasses
import json

from lm.scaling.pages.describe_plan import describe_plan
from lm.scaling.planning.next_runs import FEWEST_SAMPLES
from lm.scaling.planning.plan import Plan
from lm.scaling.planning.plan import plan as make_plan
from lm.scaling.result import FitResult

NEXT = 3  # runs that are proposed where no number is asked for


def plan(args: argparse.Namespace) -> Plan:
    """Reads the fit and plans."""
    result = FitResult.load(args.fit)
    usual = NEXT if len(result.bootstrap_samples) >= FEWEST_SAMPLES else 0
    return make_plan(
        result,
        budgets=args.budget,
        loss=args.loss,
        inference_tokens=args.inference_tokens,
        unique_tokens=args.unique_tokens,
        next_count=usual if args.next is None else args.next,
        next_budget=args.next_budget,
    )


def show(found: Plan, args: argparse.Namespace) -> None:
    """Prints the plan as text or JSON."""
    print(json.dumps(dataclasses.asdict(found), indent=2, allow_nan=False) if args.json else describe_plan(found))
