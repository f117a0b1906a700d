"""Random JSON schemas, and documents that each allows."""

import string

WORDS = ("a", "name", 'quo"te', "é", "x.y", "two words")
CHARACTERS = 'aZ0 "\\\n\té€😀\x7f/[]{},:'


def schema(random, depth=2):
    """A schema that some document satisfies; `random` is a NumPy generator."""
    kinds = ["integer", "number", "string", "boolean", "null", "enum", "const", "types"]
    kind = random.choice([*kinds, "object", "object", "array", "anyOf"] if depth else kinds)
    if kind == "integer":
        low = int(random.integers(-2000, 2000))
        bounds = {"minimum": low, "maximum": low + int(10 ** random.integers(0, 5)), "exclusiveMinimum": low - 3}
        return {"type": "integer", **{key: bound for key, bound in bounds.items() if random.random() < 0.6}}
    if kind == "string":
        low = int(random.integers(0, 3))
        lengths = {"minLength": low, "maxLength": low + int(random.integers(0, 6))}
        return {"type": "string", **{key: length for key, length in lengths.items() if random.random() < 0.7}}
    if kind == "enum":
        return {"enum": [value(random) for _ in range(random.integers(1, 4))]}
    if kind == "const":
        return {"const": value(random)}
    if kind == "types":
        return {"type": ["null", "integer"], "maximum": 12, "title": "two types"}
    if kind == "anyOf":
        return {"anyOf": [schema(random, depth - 1) for _ in range(2)]}
    if kind == "array":
        low = int(random.integers(0, 2))
        sizes = {"minItems": low, "maxItems": low + int(random.integers(0, 3))}
        kept = {key: size for key, size in sizes.items() if random.random() < 0.7}
        return {"type": "array", "items": schema(random, depth - 1), **kept}
    if kind == "object":
        names = [str(name) for name in random.choice(WORDS, random.integers(0, 4), replace=False)]
        return {
            "type": "object",
            "properties": {name: schema(random, depth - 1) for name in names},
            "required": [name for name in names if random.random() < 0.5],
            "additionalProperties": False,
        }
    return {"type": str(kind)}


def value(random):
    """Any small document."""
    kind = random.integers(0, 6)
    if kind == 0:
        return {str(random.choice(WORDS)): [1, -0.5, None]}
    return [True, None, int(random.integers(-99, 99)), text(random, 3), 2.5][kind - 1]


def text(random, length):
    return "".join(random.choice(list(CHARACTERS + string.ascii_lowercase), length))


def document(schema, random):
    """A document that the schema allows, properties in its order."""
    if "enum" in schema:
        return schema["enum"][random.integers(len(schema["enum"]))]
    if "const" in schema:
        return schema["const"]
    if "anyOf" in schema:
        return document(schema["anyOf"][random.integers(len(schema["anyOf"]))], random)
    kind = schema["type"]
    if isinstance(kind, list):
        return [None, 12, -7][random.integers(3)]
    if kind == "object":
        kept = {name: part for name, part in schema["properties"].items()
                if name in schema["required"] or random.random() < 0.5}  # fmt: skip
        return {name: document(part, random) for name, part in kept.items()}
    if kind == "array":
        low = schema.get("minItems", 0)
        return [document(schema["items"], random) for _ in range(random.integers(low, schema.get("maxItems", 3) + 1))]
    if kind == "string":
        low = schema.get("minLength", 0)
        return text(random, random.integers(low, schema.get("maxLength", low + 9) + 1))
    if kind == "integer":
        low = max(schema.get("minimum", -9000), schema.get("exclusiveMinimum", -9001) + 1)
        return int(random.integers(low, schema.get("maximum", low + 10**5) + 1))
    return {"number": round(float(random.normal()) * 1e3, 3), "boolean": bool(random.integers(2)), "null": None}[kind]
