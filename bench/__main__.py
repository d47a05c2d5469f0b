"""Run every benchmark, one after the other, and print its ratios."""

from __future__ import annotations

from bench import engine, first_sight, nothing_new


def main() -> None:
    engine.main()
    first_sight.main()
    nothing_new.main()


if __name__ == "__main__":
    main()
