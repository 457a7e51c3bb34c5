"""Structured output: grammars, compiled by the xgrammar library in a process of their own, and masks made of them."""
