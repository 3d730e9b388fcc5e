"""foreword demo"""

from __future__ import annotations

METHOD = '{"method": "prefix-tuning", "length": 10}'  # a file of 460 kB
EPOCHS = 2.5


def run(output_dir: str = "out/demo", method: str = METHOD, seed: int = 0, json: bool = False) -> None:
    """Train a frozen SmolLM2-135M on a small task in a few minutes, and compare it before and after on held-out rows.

    Examples:
        foreword demo
        foreword demo --method zero-init --output_dir out/zero

    Args:
        output_dir: folder of the adapter, demo.json and report.html.
        seed: of initialisation and data order.
        json: print the result as JSON.
    """
    from ..demo import demo
    from ..train import Training
    from .output import console, show_json, show_table

    settings = Training(
        output_dir=output_dir,
        num_train_epochs=EPOCHS,
        logging_steps=5,
        eval_strategy="no",
        group_by_length=True,
        save_strategy="no",
        seed=seed,
    )
    result = demo(method, settings)
    if json:
        show_json(result.to_dict())
        return
    for number, sample in enumerate(result.samples, 1):
        console.print(f"\n[bold]Held-out restaurant {number}[/bold]")
        for name, text in sample.items():
            console.print(f"  {name}: ", style="dim", end="")
            console.print(text, markup=False, highlight=False)
    console.print()
    show_table(
        [
            {
                "held-out score": name,
                "frozen model": f"{result.before[name]:.1%}",
                "with the adapter": f"{result.after[name]:.1%}",
            }
            for name in result.after
        ]
    )
    seconds = result.seconds
    console.print(
        f"{result.training.adapter.num_trainable:,} numbers trained in {seconds['train']:.0f} s, "
        f"{result.bytes / 1000:,.0f} kB saved. "
        f"Asking {seconds['generate before']:.0f} s before, {seconds['generate after']:.0f} s after.",
        highlight=False,
    )
    console.print(
        f"Report: {output_dir}/report.html\nTalk to it: foreword chat --adapter {output_dir}", highlight=False
    )
