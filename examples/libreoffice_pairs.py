"""Builds sentence pairs out of LibreOffice's help pages and user interface, for `examples/translate.py`.

    python examples/libreoffice_pairs.py                    # English-Spanish, into runs/libreoffice_es
    python examples/libreoffice_pairs.py --language de      # or another language that LibreOffice is packaged in
    python examples/translate.py train runs/libreoffice_es/train.tsv

For Debian, Ubuntu and their kin: it downloads three packages once (6 MB for Spanish), and installs nothing. The text is
under MPL-2.0; the NOTICE that is written beside the pairs belongs to them.
"""

import argparse
import collections
import hashlib
import html
import itertools
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import unicodedata

PARAGRAPH = re.compile(r'<(p|h[1-6])\b[^>]*\bid="((?:par|hd)_id[^"]*)"[^>]*>(.*?)</\1>', re.DOTALL)
# every tag, and what a help page says for other systems ("Option") before what it says by default ("Alt")
MARKUP = re.compile(r'<span[^>]*class="[A-Z]+">.*?(?=<span[^>]*\bid="default)|<[^>]*>', re.DOTALL)
ACCELERATOR = re.compile(r" ?\([_~]\w\)|[_~](?=\w)")  # of a menu: _File, ~File, 文件(_F)
PLAIN_MARKS = str.maketrans("“”„‟«»‘’‚‛‹›‐‑–—", "\"\"\"\"\"\"''''''----", "\u00ad\u200b\u200e\u200f\u2060\ufeff")
SENTENCE_END = re.compile(r"""(?<=[^\W\d_](?:[^\s\d.][.!?]|[.!?]["')]))\s+(?![a-z])|(?<=[।。！？])\s*(?=.)""")
CODE = re.compile(r"[#$@*+%~\[\]{}<>=|^\\_;`]|\.\.\.|…|\w\(|://|\b[a-z]+\.[a-z]{2,}|\bUNO\b")
# words are parted by all but letters, marks and digits; in Chinese and Japanese each character counts as a word
WORD_BREAKS = {code: " " for code in range(0x10000) if unicodedata.category(chr(code))[0] in "PSZ"}
WORD_BREAKS |= {code: f" {chr(code)} " for code in range(0x3040, 0xA000)}
NOTICE = """train.tsv, valid.tsv and test.tsv are text of LibreOffice, cut into sentences and filtered, out of
{packages}

This Source Code Form is subject to the terms of the Mozilla Public License, v. 2.0. If a copy of the MPL was not
distributed with this file, You can obtain one at https://mozilla.org/MPL/2.0/. The packages say:
{licence}
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--language", default="es", help="as its packages are called: de, pt-br, zh-cn")
    parser.add_argument("--folder", type=pathlib.Path, help="of the results; runs/libreoffice_LANGUAGE by default")
    parser.add_argument("--max-words", type=int, default=14, help="a side")
    arguments = parser.parse_args()
    folder = arguments.folder or pathlib.Path(f"runs/libreoffice_{arguments.language}")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        scratch = pathlib.Path(scratch)
        texts, notice = read_packages(download(arguments.language, folder, scratch), scratch)
        files = {**build(texts, arguments.max_words), "NOTICE": notice}
        for name, text in files.items():
            (scratch / name).write_text(text, encoding="utf-8", newline="\n")
        for name in files:  # only now that all are complete
            (scratch / name).replace(folder / name)
    print(f"wrote {', '.join(files)} into {folder}")


def download(language, folder, scratch):
    """The three packages of the language; a second call finds them in the folder."""
    if absent := [program for program in ("apt-get", "dpkg-deb") if not shutil.which(program)]:
        sys.exit(f"This example is for Debian, Ubuntu and their kin: it needs {' and '.join(absent)}.")
    names = ["libreoffice-help-en-us", f"libreoffice-help-{language}", f"libreoffice-l10n-{language}"]
    if not (cache := folder / f"packages-{language}").exists():
        print(f"downloading {', '.join(names)}", flush=True)
        (incoming := scratch / "packages").mkdir()
        # without the option, root's apt changes to a user who may not write here, and warns
        command = ["apt-get", "-o", "APT::Sandbox::User=root", "download", *names]
        done = subprocess.run(command, cwd=incoming, capture_output=True, text=True)
        if done.returncode:
            hint = "`apt-cache search libreoffice-help` lists the languages, `sudo apt-get update` renews old lists"
            sys.exit(f"{done.stderr}The packages could not be downloaded: {hint}.")
        incoming.rename(cache)  # only now that it is complete
    return sorted(cache.glob("*.deb"))


def read_packages(packages, scratch):
    """Unpacks the packages: the (English, translated) texts in them, and the NOTICE."""
    for package in packages:
        done = subprocess.run(["dpkg-deb", "-x", package, scratch], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{package} cannot be unpacked; remove {package.parent} and run again:\n{done.stderr}")
    texts = [*help_pairs(scratch / "usr/share/libreoffice/help"), *interface_pairs(scratch / "usr/lib/libreoffice")]
    licence = (scratch / "usr/share/doc/libreoffice-help-en-us/copyright").read_text(encoding="utf-8")
    licence = next(part for part in licence.split("\n\n") if part.startswith("Files: *"))
    return texts, NOTICE.format(packages="\n".join(package.name for package in packages), licence=licence)


def help_pairs(folder):
    """Paragraphs that have the same id on the same help page in both languages, each pair once."""
    sides = []
    for root in sorted(folder.glob("*/text"), key=lambda path: path.parent.name != "en-US"):  # English first
        pages = {page.relative_to(root): page.read_text(encoding="utf-8") for page in sorted(root.rglob("*.html"))}
        found = ((page, *match[1:]) for page, text in pages.items() for match in PARAGRAPH.findall(text))
        sides.append({(page, name): plain(html.unescape(MARKUP.sub("", text))) for page, name, text in found})
    return list(dict.fromkeys((sides[0][place], sides[1][place]) for place in sides[0] if place in sides[1]))


def interface_pairs(folder):
    """Labels and messages of the user interface, from the compiled gettext catalogues below the folder."""
    for path in sorted(folder.rglob("*.mo")):
        data, sides = path.read_bytes(), []
        count, *tables = struct.unpack_from("<3I", data, 8)
        for table in tables:  # of sizes and places; there stands context \4 singular \0 plural
            numbers = struct.unpack_from(f"<{2 * count}I", data, table)
            texts = [data[at : at + size].decode() for size, at in zip(numbers[::2], numbers[1::2])]
            sides.append([plain(ACCELERATOR.sub("", text.split("\4")[-1].split("\0")[0], count=1)) for text in texts])
        yield from zip(*sides)


def plain(text):
    """NFC, plain quotes and dashes, single spaces."""
    text = re.sub(r"«\s+|\s+»", '"', unicodedata.normalize("NFC", text))
    return " ".join(text.translate(PLAIN_MARKS).split())


def words(text):
    return text.translate(WORD_BREAKS).split()


def folded(text):
    """What is left without case, punctuation and the values of numbers."""
    return " ".join(words(re.sub(r"\d+", "0", unicodedata.normalize("NFKC", text).casefold())))


def broken_rule(pair, max_words):
    """The first rule that a pair breaks, or None for one to keep."""
    short, long = sorted(len(words(text)) for text in pair)
    ours, theirs = ({word for word in words(text.casefold()) if not word.isdigit()} for text in pair)
    rules = {
        "too short or long": short < 2 or long > max_words,
        "unlike lengths": long > 2 * short + 1,
        "unlike digits": len({tuple(sorted(map(int, re.findall(r"\d+", text)))) for text in pair}) == 2,
        "code or placeholders": any(CODE.search(text) for text in pair),
        "words in capitals": any(sum(word.isupper() for word in words(text) if word[1:]) > 1 for text in pair),
        "no beginning": not all(re.match(r"[\"'(¿¡]*\w", text) for text in pair),
        "no end": any(text.count('"') % 2 or text.count("(") != text.count(")") for text in pair),
        "not translated": not ours or 2 * len(ours & theirs) > min(len(ours), len(theirs)),
    }
    return next((rule for rule, broken in rules.items() if broken), None)


def build(texts, max_words):
    """What is to be written, by the names of the files; prints how it came about."""
    sides = ([SENTENCE_END.split(text) for text in pair] for pair in texts)
    pairs = [pair for ours, theirs in sides if len(ours) == len(theirs) for pair in zip(ours, theirs)]
    rules = [broken_rule(pair, max_words) for pair in pairs]
    parts = split(one_to_one(pair for pair, rule in zip(pairs, rules) if not rule))
    print(f"{len(texts)} texts, {len(pairs)} sentence pairs, left out:", dict(collections.Counter(filter(None, rules))))
    if not all(parts.values()):
        sys.exit(f"Too few pairs are left to fill three files: {sum(map(len, parts.values()))}.")
    for name, rows in parts.items():
        lengths = [sum(len(words(text)) for text in column) / len(rows) for column in zip(*rows)]
        print(f"{name}: {len(rows)} pairs of {lengths[0]:.1f} and {lengths[1]:.1f} words, such as")
        print("".join(f"  {source}\n    {target}\n" for source, target in rows[:3]), end="")
    return {name: "".join(f"{source}\t{target}\n" for source, target in rows) for name, rows in parts.items()}


def one_to_one(pairs):
    """One target a source and one source a target, the most frequent ones; equal is what is equal if folded."""
    kept, seen = [], set()
    for pair, _ in collections.Counter(pairs).most_common():
        keys = set(enumerate(map(folded, pair)))
        if not keys & seen:
            seen |= keys
            kept.append(pair)
    return kept


def split(pairs):
    """Rows of the three files, drawn by a hash of the source; held out are whole sentences without a near duplicate."""
    hashes = {pair: hashlib.sha256(pair[0].encode()).hexdigest() for pair in pairs}
    pairs = sorted(pairs, key=hashes.get)
    parts = {"train.tsv": [], "valid.tsv": [], "test.tsv": []}
    for pair, *near in zip(pairs, *(near_duplicates([pair[side] for pair in pairs]) for side in (0, 1))):
        whole = len(words(pair[0])) >= 4 and pair[0][0].isupper() and pair[0][-1] in ".?!"
        drawn = {"0": "valid.tsv", "1": "test.tsv"}.get(hashes[pair][-1], "train.tsv")  # by its last digit of 16
        parts[drawn if whole and not any(near) else "train.tsv"].append(pair)
    return parts


def near_duplicates(texts):
    """For each text, whether another one shares 60 % of their word bigrams (Jaccard)."""
    bigrams = [set(itertools.pairwise(["", *folded(text).split(), ""])) for text in texts]
    places = collections.defaultdict(set)
    for place, own in enumerate(bigrams):
        for bigram in own:
            places[bigram].add(place)
    for place, own in enumerate(bigrams):
        rarest = sorted(own, key=lambda bigram: len(places[bigram]))[: len(own) * 2 // 5 + 1]  # one must be shared
        others = set().union(*(places[bigram] for bigram in rarest)) - {place}
        yield any(len(own & bigrams[other]) >= 0.6 * len(own | bigrams[other]) for other in others)


if __name__ == "__main__":
    main()
