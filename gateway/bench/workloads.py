"""Prompts to measure with: chat, code, copy-heavy editing, long output; written for this purpose."""

from __future__ import annotations

from dataclasses import dataclass

CHAT = (
    "Give me three ideas for a rainy afternoon with two children, and say what each of them needs.",
    "Explain the difference between weather and climate to a twelve-year-old.",
    "What should I look at when I buy a used bicycle? Give me a short checklist.",
    "Write a polite message to a neighbour whose dog barks at night.",
    "How does a heat pump work, and when is it a bad choice?",
    "Summarise the rules of chess for somebody who knows draughts.",
    "Why do bridges have expansion joints? Answer in a short paragraph.",
    "Plan a simple weekly training schedule for somebody who wants to run ten kilometres.",
)

CODE = (
    "Write a Python function that merges two sorted lists without using sort.",
    "Write a Python class for a least-recently-used cache with get and put.",
    "Write a SQL query that returns the three best-paid employees of each department.",
    "Write a JavaScript function that debounces another function, and explain it.",
    "Write a Python function that parses a CSV line with quoted fields.",
    "Implement binary search in Go and add a small table test.",
    "Write a bash script that renames all .jpeg files in a folder to .jpg.",
    "Write a Python generator that yields prime numbers, then use it to print the first twenty.",
)

LISTING = '''class Inventory:
    """Items of a warehouse by name."""

    def __init__(self):
        self.items = {}

    def add(self, name, count):
        if count <= 0:
            raise ValueError("count must be positive")
        self.items[name] = self.items.get(name, 0) + count

    def remove(self, name, count):
        if self.items.get(name, 0) < count:
            raise ValueError("not enough " + name)
        self.items[name] -= count
        if self.items[name] == 0:
            del self.items[name]

    def total(self):
        return sum(self.items.values())
'''

COPY = tuple(
    f"Here is a file:\n\n```python\n{LISTING}```\n\n{task} Give the whole file back with only that changed."
    for task in (
        "Rename the method `total` to `count_all`.",
        "Rename the class to `Warehouse`.",
        "Add the type hint `-> None` to `add` and `remove`.",
        "Change the error text of `add` to 'count must be at least one'.",
        "Add a method `names` that returns the sorted item names.",
        "Rename the attribute `items` to `stock` everywhere.",
        "Add a docstring to `total`.",
        "Make `add` return the new count of the item.",
    )
)


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of one kind and how many tokens each answer gets."""

    name: str
    prompts: tuple[str, ...]
    max_tokens: int

    def pick(self, num: int) -> list[str]:
        """num prompts, repeated in order where there are fewer; a repeated one has its number in front, since
        what was read of a prompt before would cost nothing to read again."""
        most = len(self.prompts)
        return [
            self.prompts[i % most] if i < most else f"{i + 1}. {self.prompts[i % most]}" for i in range(num)
        ]


WORKLOADS = {
    w.name: w
    for w in (
        Workload("chat", CHAT, 128),
        Workload("code", CODE, 128),
        Workload("copy", COPY, 192),
        Workload("long", (*CHAT[3:6], *CODE[1:6]), 384),
    )
}
