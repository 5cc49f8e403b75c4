"""docs/results.md and its figures, from the result files alone: `python experiments/report.py`.

In: docs/results/*.json (one per row, written by the experiments) and docs/results/search/*.json (the search for `default`).
Out: docs/results.md and docs/results/*.png. Nothing is typed in by hand but the sentences and the paper's numbers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from depth import PRESENT, family_best, standings, winner
from report_text import (
    BIASED_MODELS,
    CERTAINTY,
    CHOICE,
    DEPTH,
    DEPTH_HELD_OUT,
    EQUAL_FACTORS,
    HOW,
    INTRODUCTION,
    LINEAR,
    LINEAR_NOTE,
    LRP_0,
    ONE_GAMMA,
    PAPER,
    PAPER_AREAS,
    PAPER_SPANS,
    RANDOMISATION,
    ROWS,
    SPANS,
    SPANS_NOTE,
    VARIANTS,
)

from dynamiclrp import evaluate as ev

Row = dict[str, Any]
TOP = 12  # candidates that the table of the search shows
SHOWN_BEFORE = 400  # held-out images of CIFAR-10 that earlier states of this page had
PEERS = (
    "Saliency", "InputXGradient", "IntegratedGradients", "GradientShap", "SmoothGrad", "DeepLift", "Captum LRP", "random",
)  # fmt: skip


def is_peer(method: str) -> bool:
    return method in PEERS or "Zennit" in method


def is_candidate(method: str) -> bool:
    """Labels of candidates are lists of knobs, "conv 0.25, first flat", or changes of `default`."""
    return method.split(" ")[0] in ("conv", "weights", "linear", "gate", "first", "sum", "default,")


def finished(row: Row) -> dict[str, Any]:
    return {name: m for name, m in row["methods"].items() if m["n"]}


def best(row: Row, names: list[str]) -> str:
    return max(names, key=lambda name: row["methods"][name]["metrics"]["abpc"][0])


def number(value: float) -> str:
    text = f"{value:.3f}" if abs(value) < 2 else f"{value:.2f}"
    return text.lstrip("-") if float(text) == 0 else text


def interval(values: list[float]) -> str:
    return f"{number(values[0])} [{number(values[1])}, {number(values[2])}]"


def behind(row: Row, method: str, reference: str) -> str:
    """`reference` - `method`, paired over the inputs."""
    a, b = (row["methods"][name]["abpc"] for name in (reference, method))
    found = ev.paired_difference(a, b)
    return f"{number(found.mean)} [{number(found.low)}, {number(found.high)}]"


def table(head: list[str], body: list[list[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, rule, *body])


# ---------------------------------------------------------------------------------------------------------------- tables


def summary(rows: dict[str, Row]) -> str:
    body = []
    for key, row in rows.items():
        names = [n for n in finished(row) if not is_candidate(n)]
        peers = [n for n in names if is_peer(n)]
        ours = [n for n in names if not is_peer(n) and n != "default"]
        peer, preset = best(row, peers), best(row, ours)
        lead = ev.paired_difference(row["methods"]["default"]["abpc"], row["methods"][peer]["abpc"])
        sure = " (sure)" if lead.low > 0 else ""
        body.append([
            f"[{row['model']}, {ROWS[key]}](#{anchor(key)})",
            f"**{interval(row['methods']['default']['metrics']['abpc'])}**",
            f"{peer} {number(row['methods'][peer]['metrics']['abpc'][0])}",
            f"{number(lead.mean)} [{number(lead.low)}, {number(lead.high)}]{sure}",
            f"`{preset}` {number(row['methods'][preset]['metrics']['abpc'][0])}",
            str(row["methods"]["default"]["n"]),
        ])  # fmt: skip
    return table(["row", "`default`", "best peer", "lead over it", "best other preset", "inputs"], body)


def anchor(key: str) -> str:
    return key.replace("_", "-")


def comparison(row: Row) -> str:
    names = [n for n in finished(row) if not is_candidate(n)]
    top = best(row, names)
    body = []
    for name in sorted(names, key=lambda n: -row["methods"][n]["metrics"]["abpc"][0]):
        m = row["methods"][name]
        shown = f"**`{name}`**" if name == "default" else name if is_peer(name) else f"`{name}`"
        body.append([
            shown,
            interval(m["metrics"]["abpc"]),
            "" if name == top else behind(row, name, top),
            number(m["metrics"]["comprehensiveness"][0]),
            number(m["metrics"]["sufficiency"][0]),
            "" if m["conservation"] is None or is_peer(name) else f"{m['conservation']:.2g}",
        ])  # fmt: skip
    failed = [f"{n}: {m['error']}" for n, m in row["methods"].items() if not m["n"]]
    head = [
        "method",
        "ABPC [95 %]",
        "behind the best [95 %]",
        "comprehensiveness",
        "sufficiency",
        "sum / score",
    ]
    notes = "\n\nDid not run: " + "; ".join(f"{text[:160]}" for text in failed) + "." if failed else ""
    return table(head, body) + notes


def facts(row: Row) -> str:
    setup = row.get("setup", {})
    parts = [row["note"]]
    if setup:
        parts.append(f"{setup['measure']}, {setup['unit']} replaced by {setup['fill']}, {setup['step']} a step")
    half = "; perturbed inputs scored in bfloat16" if row.get("scored_in_half") else ""
    versions = ", ".join(f"{k} {v}" for k, v in row["versions"].items())
    later = "".join(
        f" `{name}` later on {made['machine']}, {', '.join(f'{k} {v}' for k, v in made['versions'].items())}."
        for name, made in row.get("later", {}).items()
    )
    return f"{'; '.join(parts)}{half}. {row['date']}, {row['machine']}, {versions}.{later}"


def spans(rows: dict[str, Row]) -> str:
    text = []
    for row in rows.values():
        body = []
        names = [n for n in finished(row) if not is_candidate(n)]
        for name in sorted(names, key=lambda n: -row["methods"][n]["metrics"]["tps"][0]):
            m = row["methods"][name]["metrics"]
            shown = f"**`{name}`**" if name == "default" else name if is_peer(name) else f"`{name}`"
            body.append([
                shown,
                *(
                    f"{100 * m[k][0]:.1f} [{100 * m[k][1]:.1f}, {100 * m[k][2]:.1f}]"
                    for k in ("tps", "tgs", "tps_top2", "predicted_iou")
                ),
            ])  # fmt: skip
        head = [
            "method",
            "top token in predicted span, %",
            "in a gold span, %",
            "one of top 2 in predicted, %",
            "IoU, %",
        ]
        text.append(f"### {row['title']}\n\n{facts(row)}\n\n{table(head, body)}")
    return "\n\n".join(text)


def randomised(rows: dict[str, Row]) -> str:
    text = []
    for row in rows.values():
        layers = row["layers"]
        shown = [layers[round(i * (len(layers) - 1) / 5)] for i in range(6)] if len(layers) > 6 else layers
        shown = list(dict.fromkeys(shown))
        body = [
            [
                f"**`{n}`**" if n == "default" else n if is_peer(n) else f"`{n}`",
                *(f"{m[layer][0] + 0.0:.2f} / {m[layer][3]:.2f}".replace("-0.00", "0.00") for layer in shown),
            ]
            for n, m in row["methods"].items()
            if all(layer in m for layer in shown)
        ]
        body.sort(key=lambda line: float(line[-1].split("/")[1]))
        text.append(f"### {row['title']}\n\n{facts(row)}\n\n{table(['method', *(f'`{s}`' for s in shown)], body)}")
    return "\n\n".join(text)


def certain(rows: dict[str, Row], known: Row) -> str:
    """ABPC over all inputs, over those the model gets right, and over those it also is sure of."""
    body = []
    for key, row in rows.items():
        if key not in known:
            continue
        right, probability = known[key]["right"], known[key]["probability"]
        peers = [n for n in finished(row) if is_peer(n)]
        for label, chosen in (
            ("all", [True] * len(right)),
            ("right", [bool(r) for r in right]),
            ("right, probability above 0.5", [bool(r) and p > 0.5 for r, p in zip(right, probability)]),
        ):
            means = {n: mean_of(row["methods"][n]["abpc"], chosen) for n in ("default", *peers)}
            peer = max(peers, key=lambda n: means[n])
            shown = [means["default"], means.get("SmoothGrad"), means.get("IntegratedGradients")]
            cells = ["" if value is None else number(value) for value in shown]
            body.append(
                [f"{row['model']}, {label}", str(sum(chosen)), cells[0], f"{peer} {number(means[peer])}", *cells[1:]]
            )
    return table(["inputs", "number", "`default`", "best peer", "SmoothGrad", "IntegratedGradients"], body)


def mean_of(values: list[float], chosen: list[bool]) -> float:
    kept = [value for value, take in zip(values, chosen, strict=True) if take]
    return sum(kept) / len(kept)


def search(rows: dict[str, Row], chosen: dict[str, str]) -> str:
    """Every candidate on the search half: the chosen one's place in each row."""
    body = []
    for key, row in rows.items():
        candidates = [n for n in finished(row) if is_candidate(n)]
        if not candidates:
            continue
        top = best(row, candidates)
        mine = chosen.get(key)
        peers = [n for n, m in finished(row).items() if is_peer(n) and m["n"] == row["methods"][top]["n"]]
        line = [f"{row['model']}, {ROWS.get(key, key)}", f"{top}: {number(row['methods'][top]['metrics']['abpc'][0])}"]
        if mine in row["methods"]:
            line += [f"{mine}: {number(row['methods'][mine]['metrics']['abpc'][0])}", behind(row, mine, top)]
        else:
            line += ["", ""]
        peer = best(row, peers) if peers else None
        line.append("" if peer is None else f"{peer}: {number(row['methods'][peer]['metrics']['abpc'][0])}")
        line.append(str(row["methods"][top]["n"]))
        body.append(line)
    head = ["row", "best candidate", "nearest to `default`", "behind the best candidate", "best peer", "inputs"]
    return table(head, body)


def changes(searched: dict[str, Row]) -> str:
    """Variants of a gamma of 0.25 for convolutions: what each changes, paired over the inputs of the search half."""
    found = {key: row for key, row in searched.items() if key.startswith("variants_")}
    names = [n for n in dict.fromkeys(n for row in found.values() for n in row["methods"]) if n != ONE_GAMMA]
    body = []
    for name in names:
        line = [name]
        for row in found.values():
            m = row["methods"].get(name)
            if m is None:
                line.append("")
            elif not m["n"]:
                line.append("not finite" if "NonFinite" in m["error"] else "failed")
            else:
                lead = ev.paired_difference(m["abpc"], row["methods"][ONE_GAMMA]["abpc"])
                line.append(f"{lead.mean:+.3f} [{lead.low:+.3f}, {lead.high:+.3f}]")
        if any(cell and not cell.startswith(("+0.000", "-0.000")) for cell in line[1:]):  # it changes something
            body.append(line)

    def gain(line: list[str]) -> float:
        told = [cell for cell in line[1:] if cell[:1] in ("+", "-")]
        return -sum(float(cell.split()[0]) for cell in told) / len(told) if told else 9.0

    body.sort(key=gain)
    heads = [f"{row['model']}, {row['methods'][ONE_GAMMA]['n']} inputs" for row in found.values()]
    return table(["instead", *heads], body)


def linear_maps(rows: dict[str, Row], check: Row | None) -> str:
    """Rules for linear layers where they were measured: areas, the paired difference to LRP-0; `default` in bold. The last
    row, `check`, is of a search half."""
    body = []
    checks = [] if check is None else [(f"{check['model']}, search half", check)]
    for name, row in [(f"{row['model']}, {ROWS[key]}", row) for key, row in rows.items()] + checks:
        found = finished(row)
        plain = LRP_0 if LRP_0 in found else "default"
        if plain == "default" and "default + linear gamma 0.02" not in found:
            continue
        value = number(found[plain]["metrics"]["abpc"][0])
        line = [name, f"**{value}**" if plain == "default" else value]
        for labels in LINEAR:
            label = next((label for label in labels if label in found and label != plain), None)
            if label is None:
                line.append("")
                continue
            gain = ev.paired_difference(found[label]["abpc"], found[plain]["abpc"])
            value = number(found[label]["metrics"]["abpc"][0])
            value = f"**{value}**" if label == "default" else value
            digits = 3 if abs(found[label]["metrics"]["abpc"][0]) < 1 else 2
            line.append(f"{value} ({gain.mean:+.{digits}f} [{gain.low:+.{digits}f}, {gain.high:+.{digits}f}])")
        peers = [n for n in found if is_peer(n)]
        peer = best(row, peers) if peers else ""
        body.append([*line, f"{peer} {number(found[peer]['metrics']['abpc'][0])}" if peer else ""])
    return table(["row", "LRP-0", *LINEAR.values(), "best peer"], body) if body else ""


def depth_search(searched: dict[str, Row]) -> str:
    """The best candidates for the fall of gamma, and what `default` was before."""
    rows = {key: row for key, row in searched.items() if key.startswith("depth_")}
    found = standings(rows)
    taken = winner(found)
    shown = found[:TOP] + [s for s in found[TOP:] if s.name in (PRESENT, family_best(found).name)]
    body = []
    for s in shown:
        name = f"**{s.name}**" if s == taken else f"{s.name} (`default` before)" if s.name == PRESENT else s.name
        out = ", ".join(rows[key]["model"] for key in s.below)
        body.append([name, f"{s.score:.4f}", *(number(area) for area in s.areas.values()), out])
    heads = [f"{row['model']}, {row['methods'][PRESENT]['n']:,} inputs" for row in rows.values()]
    counted = f"The best of {len(found)} candidates, the best of the form Gamma(first, last), and the present of that time; bold was chosen:"
    return f"{counted}\n\n{table(['candidate', 'score', *heads, 'surely below before on'], body)}"


def by_depth(rows: dict[str, Row], known: Row) -> str:
    """What `default` was and is, on held-out inputs: all, those that the model gets right, those that no table had before."""
    body = []
    for key, row in rows.items():
        if EQUAL_FACTORS not in row["methods"]:
            continue
        count = row["methods"]["default"]["n"]
        peer = best(row, [n for n in finished(row) if is_peer(n)])
        parts = {"all": [True] * count, "right": [bool(r) for r in known[key]["right"]]}
        if count > SHOWN_BEFORE:
            parts["in no earlier table"] = [at >= SHOWN_BEFORE for at in range(count)]
        for label, take in parts.items():

            def lead(over: str, take: list[bool] = take, row: Row = row) -> str:
                a, b = ([v for v, t in zip(row["methods"][n]["abpc"], take) if t] for n in ("default", over))
                found = ev.paired_difference(a, b)
                return f"{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"

            means = [number(mean_of(row["methods"][n]["abpc"], take)) for n in (ONE_GAMMA, EQUAL_FACTORS, "default")]
            line = [f"{row['model']}, {label}", f"{sum(take):,}", *means, lead(EQUAL_FACTORS), f"{peer} {lead(peer)}"]
            body.append(line)
    head = [
        "held-out inputs",
        "number",
        "gamma 0.25, first flat",
        "0.5 to 0.07 by equal factors, first flat",
        "`default`",
    ]
    return table([*head, "gain over equal factors", "lead over the best peer"], body) if body else ""


def unseen(row: Row) -> str:
    """`default` against the peer that came nearest to it, on inputs of no search and no other table."""
    (peer,) = [name for name in row["methods"] if is_peer(name)]
    ours, theirs = (row["methods"][name] for name in ("default", peer))
    found = ev.paired_difference(ours["abpc"], theirs["abpc"])
    return (
        f"One more run settles {row['model']}: on {ours['n']:,} images that no search and no other table had, for these two methods alone, "
        f"`default` has {interval(ours['metrics']['abpc'])}, {peer} {interval(theirs['metrics']['abpc'])}: a lead of "
        f"{found.mean:.3f} [{found.low:.3f}, {found.high:.3f}]."
    )


def beside(rows: dict[str, Row], answers: dict[str, Row]) -> str:
    """The paper's areas next to ours, on its scale; its question answering next to ours."""
    parts = []
    for caption, theirs, key in PAPER_AREAS:
        if key not in rows:
            continue
        row = rows[key]
        body = []
        for name, (number_there, ours) in theirs.items():
            here = [n for n in ours if n in finished(row)]
            top = best(row, here) if here else None
            shown = "" if top is None else f"{top}: {ev.PAPER_SCALE * row['methods'][top]['metrics']['abpc'][0]:.2f}"
            body.append([name, f"{number_there:.2f}", shown])
        here = f"here: {row['model']}, {row['data']}, {row['methods']['default']['n']} inputs"
        parts.append(table([caption, "ABPC in the paper", here], body))
    body = [[name, *values] for name, *values in PAPER_SPANS]
    for row in answers.values():
        for name in ("default", "dynamic (linear 0.001)", "dynamic", "gamma", "attnlrp"):
            v = row["methods"][name]["metrics"]
            body.append([f"{row['model']}, `{name}` (here)", f"{100 * v['tgs'][0]:.1f}", f"{100 * v['tps'][0]:.1f}"])
    if answers:
        parts.append(table(["model, rules", "top token in a gold span, %", "in the predicted span, %"], body))
    return "\n\n".join(parts)


def trained(models: Row) -> str:
    """What experiments/train reached."""
    body = []
    for name, facts in models.items():
        scores = [
            f"{label} {100 * facts[key]:.1f} %"
            for key, label in (("test_accuracy", "test accuracy"), ("exact_match", "exact match"), ("f1", "F1"))
            if key in facts
        ]
        more = f", on from earlier weights ({facts['started_from']})" if facts.get("started_from") else ""
        more += ", taught by VGG16" if facts.get("teacher") else ""
        spent = f"{facts['epochs']:.0f} epochs{more}" if "epochs" in facts else f"{facts['seconds']} s"
        body.append([f"`{name}`", ", ".join(scores), spent])
    return "Trained here, on a shared GPU and a time budget:\n\n" + table(
        ["weights", "on held-out data", "training"], body
    )


# --------------------------------------------------------------------------------------------------------------- figures


def curves(row: Row, path: Path) -> None:
    """MoRF and LeRF of `default`, the best other preset and the best peers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = [n for n in finished(row) if not is_candidate(n)]

    def top(kind: list[str], count: int) -> list[str]:
        return sorted(kind, key=lambda n: -row["methods"][n]["metrics"]["abpc"][0])[:count]

    shown = [
        "default",
        *top([n for n in names if not is_peer(n) and n != "default"], 1),
        *top([n for n in names if is_peer(n)], 2),
        *[n for n in ("IntegratedGradients", "random") if n in names],
    ]
    shown = list(dict.fromkeys(shown))
    colours = ["#0b6e4f", "#2b6cb0", "#c05621", "#b7791f", "#6b46c1", "#718096"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), width_ratios=(1.25, 1), layout="constrained")
    for name, colour in zip(shown, colours):
        m = row["methods"][name]
        x = [100 * i / (len(m["morf"]) - 1) for i in range(len(m["morf"]))]
        left.plot(x, m["lerf"], color=colour, lw=1.6, ls="--")
        left.plot(x, m["morf"], color=colour, lw=1.6, label=name)
        left.fill_between(x, m["morf"], m["lerf"], color=colour, alpha=0.12 if name == "default" else 0)
    measure = str(row["setup"].get("measure", "score"))
    left.set(
        xlabel="removed, %",
        ylabel=measure,
        title=f"{row['model']}: most relevant first (—), least relevant first (- -)",
    )
    figure.legend(fontsize=7, frameon=False, loc="outside lower left", ncols=6)
    ordered = sorted(names, key=lambda n: row["methods"][n]["metrics"]["abpc"][0])
    values = [row["methods"][n]["metrics"]["abpc"] for n in ordered]
    paint = ["#0b6e4f" if n == "default" else "#c05621" if is_peer(n) else "#2b6cb0" for n in ordered]
    low = [max(0, v[0] - v[1]) for v in values]
    high = [max(0, v[2] - v[0]) for v in values]
    right.barh(range(len(ordered)), [v[0] for v in values], xerr=[low, high], color=paint, error_kw={"lw": 0.8})
    right.set_yticks(range(len(ordered)), ordered, fontsize=6)
    right.set(xlabel="ABPC", title="green: default, blue: our other presets, orange: peers")
    for axis in (left, right):
        axis.title.set_fontsize(8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


LINES = {  # of the randomisation figure: colour and style
    "default": ("#0b6e4f", "-"),
    "attnlrp": ("#2b6cb0", "-"),
    "gamma": ("#63b3ed", "-"),
    "dynamic": ("#6b46c1", "-"),
    "Saliency": ("#b7791f", "--"),
    "IntegratedGradients": ("#718096", "--"),
    "SmoothGrad": ("#c05621", "--"),
    "Zennit EpsilonPlusFlat": ("#b83280", ":"),
    "GuidedBackprop (Zennit)": ("#1a202c", ":"),
}


def randomisation_curves(rows: dict[str, Row], path: Path) -> None:
    """Rank correlations, signed and of magnitudes, from the trained model to one whose every layer is random."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        2, len(rows), figsize=(2.6 * len(rows), 5), sharex=True, sharey="row", layout="constrained", squeeze=False
    )
    for at, (row, column) in enumerate(zip(rows.values(), axes.T)):
        steps = [i / len(row["layers"]) for i in range(len(row["layers"]) + 1)]
        for axis, place, label in ((column[0], 0, "signed"), (column[1], 3, "of magnitudes")):
            for name, (colour, style) in LINES.items():
                values = row["methods"].get(name, {})
                if len(values) == len(row["layers"]):
                    line = [1.0, *(values[layer][place] for layer in row["layers"])]
                    axis.plot(steps, line, color=colour, ls=style, lw=1.3, label=name if place == 0 else None)
            axis.axhline(0, color="#222222", lw=0.6)
            axis.spines[["top", "right"]].set_visible(False)
            if at == 0:
                axis.set_ylabel(f"rank correlation, {label}", fontsize=8)
        column[0].set_title(row["model"], fontsize=9)
        column[1].set_xlabel("share of layers that are random,\nfrom the output", fontsize=7)
    handles = {text: line for axis in axes[0] for line, text in zip(*axis.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), fontsize=7, frameon=False, loc="outside lower center", ncols=5)
    figure.savefig(path, dpi=110)
    plt.close(figure)


# ------------------------------------------------------------------------------------------------------------------ page


def load(folder: Path) -> dict[str, Row]:
    return {file.stem: json.loads(file.read_text("utf-8")) for file in sorted(folder.glob("*.json"))}


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--results", type=Path, default=Path("docs/results"), help="the folder with the result files")
    command.add_argument("--out", type=Path, default=Path("docs/results.md"))
    options = command.parse_args()
    found = load(options.results)
    rows = {key: found[key] for key in ROWS if key in found}
    answers = {key: found[key] for key in SPANS if key in found}
    randomisations = {key: row for key, row in found.items() if row.get("kind") == "randomisation"}
    if not rows:
        raise SystemExit(f"{options.results}: no result files; run the experiments first")
    parts = ["# Results", INTRODUCTION, summary(rows)]
    picture = options.results / "heatmaps.png"
    if picture.exists():
        parts.append(f"![Heat maps of one photo by several methods]({options.results.name}/heatmaps.png)")
    if (options.results / "sentence.png").exists():
        parts.append(f"![Heat maps of one sentence by several methods]({options.results.name}/sentence.png)")
    parts += ["## The choice of `default`", CHOICE]
    searched = load(options.results / "search")
    if searched:
        parts.append(search({k: searched[k] for k in ROWS if k in searched}, choice(searched)))
    if linear := linear_maps(rows, searched.get("t5_squad_curves")):
        parts += [LINEAR_NOTE, linear]
    if any(key.startswith("variants_") for key in searched):
        parts += [VARIANTS, changes(searched)]
    if "certainty" in found:
        if any(key.startswith("depth_") for key in searched):
            parts += [DEPTH, depth_search(searched), DEPTH_HELD_OUT]
        parts.append(by_depth(rows, found["certainty"]["rows"]))
    if "vgg16_fresh" in found:
        parts.append(unseen(found["vgg16_fresh"]))
    parts += ["## Beside the paper", PAPER, beside(rows, answers)]
    for key, row in rows.items():
        curves(row, options.results / f"{key}.png")
        parts += [
            f'<a id="{anchor(key)}"></a>\n\n## {row["model"]}, {ROWS[key]}',
            facts(row),
            f"![Curves]({options.results.name}/{key}.png)",
            comparison(row),
        ]
    if "certainty" in found:
        parts += ["## Which inputs count", CERTAINTY, certain(rows, found["certainty"]["rows"])]
    if answers:
        parts += ["## Answers to questions", SPANS_NOTE, spans(answers)]
    if randomisations:
        randomisation_curves(randomisations, options.results / "randomisation.png")
        picture = f"![Rank correlations against the layers that are random]({options.results.name}/randomisation.png)"
        parts += ["## Parameter randomisation", RANDOMISATION, picture, randomised(randomisations)]
    parts += ["## How to run them", HOW]
    if "trained" in found:
        parts.append(trained(found["trained"]["models"]))
    text = "\n\n".join(part.strip("\n") for part in parts) + "\n"
    options.out.write_text(text, encoding="utf-8")
    print(
        f"{options.out}: {len(rows)} rows, {len(answers)} question-answering rows, {len(randomisations)} randomisations"
    )


def choice(searched: dict[str, Row]) -> dict[str, str]:
    """The candidate that is `default` in each row of the search; knobs that a row does not have are left out of labels."""
    from methods import BIASED_LABELS, DEFAULT_LABELS

    def labels(key: str) -> tuple[str, ...]:
        return (BIASED_LABELS if key.startswith(BIASED_MODELS) else ()) + DEFAULT_LABELS

    return {key: next((label for label in labels(key) if label in row["methods"]), "") for key, row in searched.items()}


if __name__ == "__main__":
    main()
