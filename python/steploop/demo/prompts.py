"""The demo's 24 chat prompts; a few answers are long, most are short, as in real traffic."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DemoPrompt:
    """One question and the most tokens its answer may take."""

    text: str
    max_tokens: int


PROMPTS = tuple(
    DemoPrompt(text, max_tokens)
    for text, max_tokens in [
        ("What is the capital of France? Answer in one word.", 8),
        ("Write a long story about a lighthouse keeper who finds a message in a bottle.", 320),
        ("Name three primary colours.", 24),
        ("Is the sun a star? Answer yes or no.", 8),
        ("Explain in two sentences why the sky is blue.", 64),
        ("Give me a synonym for 'happy'.", 12),
        ("Translate 'good morning' into French.", 16),
        ("Describe how bread is made, step by step.", 192),
        ("What is 7 times 8?", 12),
        ("Who wrote 'Romeo and Juliet'?", 20),
        ("Write a detailed guide to growing tomatoes on a balcony.", 288),
        ("Which planet is the largest in our solar system?", 20),
        ("Finish the sentence: The early bird", 16),
        ("List five animals that live in the ocean.", 48),
        ("What does HTTP stand for?", 16),
        ("Tell me a joke about computers.", 48),
        ("What colour do you get if you mix blue and yellow?", 16),
        ("Write a letter to a friend about a week of hiking in the mountains.", 256),
        ("How many days are there in a leap year?", 12),
        ("Give me one tip for sleeping better.", 40),
        ("Summarise the plot of a story about a dragon who is afraid of fire.", 128),
        ("What is the opposite of 'cold'?", 8),
        ("Name the four seasons.", 20),
        ("Why do we have leap years? Answer briefly.", 64),
    ]
)
