"""foreword push"""

from __future__ import annotations


def run(adapter: str, repo: str, private: bool = False, card_only: bool = False) -> None:
    """Upload an adapter folder to the Hugging Face Hub, with a model card made from its files.

    Examples:
        foreword push out/support me/support-prefix --private
        foreword push out/support me/support-prefix --card_only

    A README.md that is in the folder already is uploaded as it is. Scores stand in `scores.json`, names and numbers.

    Args:
        adapter: an adapter folder.
        repo: user/name.
        private: of a repository that is made.
        card_only: write the model card into the folder, over what it holds, and upload nothing.
    """
    from ..hub import push, write_card
    from .output import console

    if card_only:
        console.print(f"Wrote {write_card(adapter, repo)}", highlight=False)
        return
    console.print(f"Pushed to {push(adapter, repo, private=private)}", highlight=False)
