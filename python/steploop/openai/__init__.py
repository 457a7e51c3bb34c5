"""OpenAI's request bodies and what answers them, the same for `steploop serve` and `steploop batch`. Needs pydantic."""
