"""Draws a selection: the score against the number of kept units, and for heads a map of the order."""

from __future__ import annotations

import io

from .selection_file import Selection


def selection_plot(selection: Selection) -> bytes:
    """A PNG file: the score after each round; for heads, beside it, where the kept ones are."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heads = selection.unit == "kv_head"
    figure = Figure(figsize=(10 if heads else 8, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2 if heads else 1, squeeze=False)[0]
    scores = [1.0, *(step["score"] for step in selection.scores["rounds"])]
    panels[0].plot(range(len(scores)), scores, "o-", color="#4c78a8", markersize=3, label=selection.method)
    panels[0].plot([len(scores) - 1], [selection.scores["uniform"]], "x", color="#e45756", label="evenly spread")
    panels[0].axhline(0.0, color="grey", linewidth=0.6)
    what = "key/value heads" if heads else "layers"
    panels[0].set(xlabel=f"kept {what}", ylabel="score (0: teacher, 1: windows)", title=selection.teacher)
    panels[0].legend()
    if heads:
        order = np.full((selection.num_key_value_heads, selection.num_hidden_layers), np.nan)
        for place, (layer, head) in enumerate(selection.order):
            order[head, layer] = place + 1
        image = panels[1].imshow(order, cmap="viridis_r", aspect="auto", interpolation="nearest")
        panels[1].set(xlabel="layer", ylabel="key/value head", title="order in which heads were kept")
        figure.colorbar(image, ax=panels[1])
    else:
        for place, (score, (layer,)) in enumerate(zip(scores[1:], selection.order, strict=True)):
            panels[0].annotate(str(layer), (place + 1, score), textcoords="offset points", xytext=(4, 4), fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120, metadata={"Software": None})
    return buffer.getvalue()
