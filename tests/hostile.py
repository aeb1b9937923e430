"""Hostile names of files, classes and splits. Each has a special meaning in one output format."""

NAMES = (
    # rich
    *("road [paved]", "lane [/x]", "[red]alert", "[link=file:///etc]a[/link]", ":car: a"),
    # terminals: control characters, and characters that hide text or change its direction
    *("a\x1b[31mb", "a\rb", "a\nb", "a\x9b2Jb", "a\u202eb", "a\u2028b", "a\x00b", "caf\udce9", "\ud800"),
    # matplotlib
    *("$x_$", r"costs $5, and $6 \frac", r"a\$b$", "_name", "a_b_c"),
    # HTML
    *("<script>alert(1)</script>", "\"><img src=x onerror='a()'>", "a & b", "&lt;"),
    # Markdown
    *("a|b", "a`b|`c", "*a* _b_ ~~c~~", "[a](javascript:b)", "<!-- tpu:end -->"),
    # CSV
    *("=1+1", "+1+1", "-1+1", "@a", "\ta", "\uff1da", "a,b", 'a"b', "-"),
    # Python's string formatting
    *("{a}", "%s"),
    *("größe 模型 \u3000 \u200d", "plain"),
)
