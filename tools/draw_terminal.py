"""Draw `docs/images/terminal.svg`, the picture in the README: what a session really prints.

Example: python tools/draw_terminal.py
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.text import Text

from treadle import Count, Document, ExtendedReference, Id, Store

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "terminal.svg"
WIDTH = 92


class Customer(Document, collection="customers"):
    name: str
    order_count: Annotated[int, Count("Order", by="customer_id")] = 0


class Order(Document, collection="orders"):
    customer_id: Id
    customer_name: Annotated[str | None, ExtendedReference(Customer, by="customer_id", field="name")] = None


# Statements that print nothing, and expressions whose values are printed; None for an empty line.
SESSION = (
    "# An insert maintains the count and the copy in one transaction.",
    'ada = store.insert(Customer(name="Ada"))',
    "order = store.insert(Order(customer_id=ada.id))",
    "store.get(Customer, ada.id).order_count, order.customer_name",
    None,
    "# A rename updates every copy.",
    'ada = store.update(Customer, ada.id, {"$set": {"name": "Ada Lovelace"}})',
    "store.get(Order, order.id).customer_name",
    None,
    "# Another program writes past Treadle: verify finds it, repair restores it.",
    'raw = store.collection(Order).update_one({}, {"$set": {"customer_name": "Bob"}})',
    "[(each.model, each.path, each.stored, each.expected) for each in store.verify()]",
    "store.repair()",
    "store.verify()",
)
# Rich's own template loads fonts from another host; this one loads nothing.
TEMPLATE = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, monospace; font-size: {char_height}px;
line-height: {line_height}px; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}"
height="{terminal_height}"/></clipPath>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def draw(store: Store) -> str:
    """Perform the session on an empty database, and return the picture."""
    console = Console(
        record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    names: dict[str, Any] = {"store": store, "Customer": Customer, "Order": Order}
    for line in SESSION:
        if line is None:
            console.print()
        elif line.startswith("#"):
            console.print(Text(f">>> {line}", style="green"))
        elif " = " in line.partition("(")[0]:
            console.print(Text(f">>> {line}"))
            exec(line, names)
        else:
            console.print(Text(f">>> {line}"))
            console.print(Text(repr(eval(line, names)), style="bold"))
    return console.export_svg(title="python", code_format=TEMPLATE, unique_id="terminal")


if __name__ == "__main__":
    with Store.local(models=[Customer, Order]) as local:
        local.setup()
        PICTURE.write_text(draw(local))
