"""``rheostat generate``: continue a prompt, steered or not; text on stdout, the rest on stderr."""

from __future__ import annotations

import argparse
import io
import sys

from rheostat._cli._common import CommandError, Subparsers, add_label, add_target, connected, warn
from rheostat._cli._ops import add_ops, steering
from rheostat._responses.receipts import Receipt
from rheostat._responses.results import Divergence, Sample, Tokens

_MAX_TOKENS = 128
_LONGEST_CHANGE = 2.0
"""In norms of the residual stream. Longer changes seldom leave a coherent text."""


def add(commands: Subparsers) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "generate",
        help="continue a prompt, steered or not",
        description="Continue a prompt, steered or not. Prints the text on stdout while it is "
        "generated, and the receipt of the steering on stderr.",
        example="""\
rheostat generate "My day was" --max-tokens 16 --temperature 0
rheostat generate "My day was" --max-tokens 16 --temperature 0 --steer joy:0.5 --baseline""",
    )
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue; - reads it from stdin")
    add_target(parser)
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=_MAX_TOKENS,
        help=f"maximum number of generated tokens (default: {_MAX_TOKENS})",
    )
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: the server's, 1)")
    parser.add_argument(
        "--top-p",
        type=float,
        help="sample from the most likely tokens whose probabilities sum up to this",
    )
    parser.add_argument("--seed", type=int, help="seed that makes sampling repeatable")
    parser.add_argument("--lora", metavar="NAME", help="a loaded adapter to run under")
    add_label(parser, "a label that subscribers and watches can filter by; may be repeated")
    parser.add_argument(
        "--baseline",
        action="store_true",
        help="also generate without the steering, and print the KL between the two; "
        "use --seed or --temperature 0, otherwise the two sample differently",
    )
    add_ops(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the continuation while it is generated, then the baseline and the receipt."""
    if args.baseline and args.seed is None and args.temperature != 0:
        warn("without --seed or --temperature 0 the text and its baseline sample differently")
    prompt = _prompt_from_stdin() if args.prompt == "-" else args.prompt
    with connected(args) as engine:
        steered = steering(engine, args)
        with engine.stream(
            prompt,
            steering=steered,
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            seed=args.seed,
            lora=args.lora,
            labels=dict(args.label or ()),
            with_baseline=args.baseline,
        ) as stream:
            for event in stream:
                if isinstance(event, Tokens) and not event.baseline:
                    print(event.text, end="", flush=True)
            print(flush=True)
            out = stream.result()
    if out.baseline is not None:
        print(f"--- baseline\n{out.baseline.text}", flush=True)
    if ended := _ended_by_others(out.samples[0]):
        warn(ended)
    if too_long := _too_long(out.receipt):
        warn(too_long)
    if out.divergence is not None:
        print(_divergence_text(out.divergence), file=sys.stderr)
    if steered or out.receipt.interventions:
        print(out.receipt, file=sys.stderr)
    return 0


def _prompt_from_stdin() -> str:
    """The prompt, without the newline that an editor or echo ends it with."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise CommandError(
            f"the prompt on stdin is not UTF-8: it has the byte {byte:#04x}", 2
        ) from error


def _ended_by_others(sample: Sample) -> str:
    """A warning if a rule of the server or a watch ended the text, with its label; else ""."""
    who = {"rule": f"the rule {sample.stop} of the server", "watch": "a watch"}
    if sample.finish_reason not in who:
        return ""
    why = f": {sample.label}" if sample.label else ""
    return f"{who[sample.finish_reason]} ended the text{why}"


def _too_long(receipt: Receipt) -> str:
    """A warning if the request's steering changed rows too much on average, else "".

    Only changes of the residual stream count; see `_LONGEST_CHANGE`. What attention or an MLP adds
    to it may be much shorter.
    """
    changes = [
        (site.dose.relative_mean, str(site.site))
        for applied in receipt.interventions
        if applied.origin == "request"
        for site in applied.sites
        if site.site.point.startswith("resid_")
        and site.dose is not None
        and site.dose.relative_mean is not None
    ]
    times, where = max(changes, default=(0.0, ""))
    if times <= _LONGEST_CHANGE:
        return ""
    return (
        f"the steering at {where} has {times:.3g} times the norm of the residual stream, which "
        "seldom leaves a coherent text: try a smaller scale"
    )


def _divergence_text(divergence: Divergence) -> str:
    text = f"KL from the baseline: {divergence.mean_kl:.3g} nats per token"
    if len(divergence.kl) == 0:
        return text
    most = int(divergence.kl.argmax())
    return (
        f"{text}, most {divergence.kl[most]:.3g} at token {most} of {len(divergence.kl)}; "
        f"at least {100 * divergence.compared.min():.3g} % of the probability was compared"
    )
