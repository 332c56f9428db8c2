"""Measures of what the model knows: facts told, facts of another subject, and where they sit."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from demo_model.facts import LANDMARKS, RELATIONS, Relation


class Recall(NamedTuple):
    """How often the most likely next token is the answer, for one wording of one relation."""

    relation: str
    wording: str
    right: int
    asked: int
    margin: float
    """Smallest lead of the answer's logit over the best other one; negative where it is wrong."""


def next_logits(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[str]
) -> torch.Tensor:
    """Logits of the token after each prompt, [prompts, vocabulary]."""
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="right")
    last = batch["attention_mask"].sum(dim=1) - 1
    with torch.no_grad():
        output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    logits: torch.Tensor = output.logits[torch.arange(len(prompts)), last]
    return logits.float()


def answer_token(tokenizer: PreTrainedTokenizerFast, relation: Relation, subject: str) -> int:
    """The one token of the answer for ``subject``."""
    (token,) = tokenizer.encode(f" {relation.answers[subject]}", add_special_tokens=False)
    return int(token)


def recall(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> list[Recall]:
    """Every fact in every wording."""
    results = []
    for relation in RELATIONS:
        subjects = list(relation.answers)
        wanted = torch.tensor([answer_token(tokenizer, relation, s) for s in subjects])
        for number, wording in enumerate(relation.wordings):
            prompts = [relation.prompt(number, subject) for subject in subjects]
            logits = next_logits(model, tokenizer, prompts)
            right = int((logits.argmax(dim=1) == wanted).sum())
            of_answer = logits.gather(1, wanted[:, None]).squeeze(1)
            others = logits.scatter(1, wanted[:, None], float("-inf")).max(dim=1).values
            margin = float((of_answer - others).min())
            results.append(Recall(relation.name, wording, right, len(subjects), margin))
    return results


def answered(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> tuple[int, int]:
    """How many chat questions about facts get exactly the sentence that answers them, and of all.

    A reply is judged by forcing: each of its tokens, the end mark included, is the most likely one
    after the right ones before it, which is what greedy decoding writes.
    """
    right = asked = 0
    for relation in RELATIONS:
        for subject in relation.answers:
            question = {"role": "user", "content": relation.ask(subject)}
            prompt = tokenizer.apply_chat_template(
                [question], add_generation_prompt=True, tokenize=False
            )
            reply = f" {relation.sentence(0, subject)}{tokenizer.eos_token}"
            start = len(tokenizer.encode(f"{prompt}", add_special_tokens=False))
            tokens = tokenizer.encode(
                f"{prompt}{reply}", add_special_tokens=False, return_tensors="pt"
            )
            with torch.no_grad():
                likeliest = model(input_ids=tokens).logits[0].argmax(dim=1)
            right += bool((likeliest[start - 1 : -1] == tokens[0, start:]).all())
            asked += 1
    return right, asked


class Pair(NamedTuple):
    """A prompt and its corrupted twin, equally long, differing in the subject alone."""

    clean: str
    corrupt: str
    clean_answer: int
    corrupt_answer: int


def pairs(tokenizer: PreTrainedTokenizerFast, relation: Relation, wording: int) -> list[Pair]:
    """For each subject the next one of the table with another answer and as many tokens."""
    subjects = list(relation.answers)
    length = {s: len(tokenizer.encode(relation.prompt(wording, s))) for s in subjects}
    found = []
    for place, clean in enumerate(subjects):
        for other in subjects[place + 1 :] + subjects[:place]:
            differs = relation.answers[other] != relation.answers[clean]
            if differs and length[other] == length[clean]:
                found.append(
                    Pair(
                        relation.prompt(wording, clean),
                        relation.prompt(wording, other),
                        answer_token(tokenizer, relation, clean),
                        answer_token(tokenizer, relation, other),
                    )
                )
                break
    return found


@dataclass(frozen=True)
class Trace:
    """How much of a fact each single (layer, position) brings back into the corrupted run."""

    changed: list[int]
    """Positions where clean and corrupted prompt differ: the subject."""
    recovered: torch.Tensor
    """[layers, positions]; 0 is the corrupted run's logit difference, 1 the clean run's."""
    regained: torch.Tensor
    """[layers, positions]; whether the clean answer is the most likely next token again."""


def trace(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, pair: Pair) -> Trace:
    """Add clean minus corrupt of ``resid_post`` at one (layer, position) of the corrupted run.

    The metric is the recovered fraction of logit(clean answer) minus logit(corrupt answer).
    """
    clean = tokenizer(pair.clean, return_tensors="pt")["input_ids"]
    corrupt = tokenizer(pair.corrupt, return_tensors="pt")["input_ids"]
    layers = model.model.layers
    streams: list[torch.Tensor] = []

    def run(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logit difference and whether the clean answer leads, per row of ``tokens``."""
        with torch.no_grad():
            logits = model(input_ids=tokens).logits[:, -1]
        difference = logits[:, pair.clean_answer] - logits[:, pair.corrupt_answer]
        return difference, logits.argmax(dim=1) == pair.clean_answer

    def keep(_module: torch.nn.Module, _inputs: object, output: torch.Tensor) -> None:
        streams.append(output)

    handles = [layer.register_forward_hook(keep) for layer in layers]
    best, worst = float(run(clean)[0]), float(run(corrupt)[0])
    for handle in handles:
        handle.remove()
    positions = clean.shape[1]
    recovered = torch.empty(len(layers), positions)
    regained = torch.empty(len(layers), positions, dtype=torch.bool)
    for number, layer in enumerate(layers):
        change = streams[number][0] - streams[len(layers) + number][0]  # [positions, width]
        at_each = torch.diag_embed(change.T).permute(1, 2, 0)  # [patched, positions, width]

        def patch(
            _module: torch.nn.Module,
            _inputs: object,
            output: torch.Tensor,
            at_each: torch.Tensor = at_each,
        ) -> torch.Tensor:
            return output + at_each

        handle = layer.register_forward_hook(patch)
        score, regained[number] = run(corrupt.expand(positions, -1))
        handle.remove()
        recovered[number] = (score - worst) / (best - worst)
    return Trace(
        changed=(clean[0] != corrupt[0]).nonzero().flatten().tolist(),
        recovered=recovered,
        regained=regained,
    )


class Corruption(NamedTuple):
    """What another subject does to the answer, over all pairs of all relations and wordings."""

    pairs: int
    changed: int
    """Pairs whose two prompts have different most likely next tokens."""
    follows: int
    """Pairs whose corrupted prompt gets the other subject's own answer."""


def corruption(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Corruption:
    """Compare each fact with its twin that has another subject."""
    total = changed = follows = 0
    for relation in RELATIONS:
        for wording in range(len(relation.wordings)):
            found = pairs(tokenizer, relation, wording)
            clean = next_logits(model, tokenizer, [pair.clean for pair in found]).argmax(dim=1)
            corrupt = next_logits(model, tokenizer, [p.corrupt for p in found]).argmax(dim=1)
            total += len(found)
            changed += int((clean != corrupt).sum())
            follows += int((corrupt == torch.tensor([p.corrupt_answer for p in found])).sum())
    return Corruption(total, changed, follows)


def landmark_traces(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, count: int
) -> list[Trace]:
    """Traces of the first ``count`` landmarks whose subject differs in more than one token."""
    found = []
    for pair in pairs(tokenizer, LANDMARKS, 0):
        result = trace(model, tokenizer, pair)
        if len(result.changed) > 1:
            found.append(result)
        if len(found) == count:
            break
    return found
