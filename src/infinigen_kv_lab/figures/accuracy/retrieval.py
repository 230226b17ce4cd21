"""Beyond the paper: what is still found in a long context, by depth and length."""

from __future__ import annotations

from collections.abc import Sequence

from infinigen_kv_lab.evals.retrieval import Retrieval
from infinigen_kv_lab.evals.task import TaskOptions
from infinigen_kv_lab.figures.accuracy.evaluation import Points
from infinigen_kv_lab.figures.accuracy.figure import AccuracyFigure, Cases, results_of
from infinigen_kv_lab.figures.accuracy.setting import COMPARED, SHARE, AccuracySetting, evaluation
from infinigen_kv_lab.figures.drawing import Canvas, heat_map, name_axes
from infinigen_kv_lab.figures.rows import Row, interval, names, rows_with, spread


class RetrievalMap(AccuracyFigure):
    """One map for each policy: depth down, length to the right; above it the share of all answers
    that are right, with its interval.
    """

    def rows_of(self, result: Points) -> list[Row]:
        return [
            {
                "system": name,
                "length": cell.length,
                "depth": cell.depth,
                "right": cell.right,
                "asked": cell.asked,
                "right_of_all": found.right,
                "asked_of_all": found.asked,
                **spread("accuracy", found.accuracy),
                **spread("less_full", found.difference),
                "fetched_share": found.fetched_share,
            }
            for name, found in results_of(result, Retrieval).items()
            for cell in found.cells
        ]

    def remarks(self, setting: AccuracySetting, rows: Sequence[Row]) -> list[str]:
        each = {row["system"]: row for row in rows}
        return [
            f"{name}: {row['right_of_all']} of {row['asked_of_all']} right, a share of "
            f"{row['accuracy']:.3f}{interval(row, 'accuracy')}; {100 * row['fetched_share']:.1f} % "
            "fetched."
            for name, row in each.items()
        ]

    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        systems = names(rows)
        lengths = sorted({row["length"] for row in rows})
        depths = sorted({row["depth"] for row in rows})
        panels = canvas.panels(-(-len(systems) // 2), 2, height=1.2 + 2.6 * -(-len(systems) // 2))
        image = None
        for axes, system in zip(panels.flat, systems, strict=False):
            cells = {
                (row["depth"], row["length"]): (row["right"], row["asked"])
                for row in rows_with(rows, system=system)
            }
            grid = [[cells.get((depth, length)) for length in lengths] for depth in depths]
            image = heat_map(
                axes,
                [[cell and cell[0] / cell[1] for cell in row] for row in grid],
                [str(length) for length in lengths],
                [f"{depth:g}" for depth in depths],
                cells=[[f"{cell[0]}/{cell[1]}" if cell else "" for cell in row] for row in grid],
            )
            total = rows_with(rows, system=system)[0]
            right = f"{system}: {total['right_of_all']} of {total['asked_of_all']}"
            title = f"{right}{interval(total, 'accuracy')}"
            name_axes(axes, "context (tokens, nominal)", "depth", title=title)
        for axes in panels.flat[len(systems) :]:
            axes.set_visible(False)
        canvas.colour_bar(image, list(panels[:, -1]), "share of right answers")


class Passkey(RetrievalMap):
    name = "passkey"
    title = "A passkey in a long text, by depth and length: right answers"
    about = (
        "A field counts the prompts whose five digits are all the most likely ones, and those that "
        "there are. Depth 0 is the start of the context. Prompts that exceed the model's positions "
        "are left out."
    )

    def cases(self, setting: AccuracySetting) -> Cases:
        samples = setting.scale.passkeys
        return [({}, evaluation("passkey", COMPARED, TaskOptions(), samples, budget=SHARE))]


class Needles(RetrievalMap):
    name = "needles"
    title = "Several numbers in a book, asked for one after the other: right answers"
    about = (
        "Each context hides five numbers and is read once; the questions come later, in random "
        "order, as further turns over the same cache. A field counts the right answers and the "
        "questions."
    )

    def cases(self, setting: AccuracySetting) -> Cases:
        scale = setting.scale
        options = TaskOptions(
            lengths=scale.needle_lengths, repeats=scale.needle_repeats, text=setting.text
        )
        return [({}, evaluation("needles", COMPARED, options, None, budget=SHARE))]
