"""`examples/libreoffice_pairs.py` on made-up packages and stand-ins for apt-get and dpkg-deb; once for real."""

import importlib.util
import itertools
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import tarfile

import pytest

PROGRAM = pathlib.Path(__file__).parents[1] / "examples/libreoffice_pairs.py"
FILES = ["train.tsv", "valid.tsv", "test.tsv"]
spec = importlib.util.spec_from_file_location("libreoffice_pairs", PROGRAM)
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)

APT_GET = """#!{python}
import pathlib, shutil, sys
store = pathlib.Path(r"{store}")
with open(store / "calls", "a") as calls:
    calls.write("called\\n")
for name in sys.argv[sys.argv.index("download") + 1 :]:
    found = list(store.glob(name + "_*.deb"))
    if not found:
        sys.exit("E: Unable to locate package " + name)
    shutil.copy(found[0], ".")
"""
DPKG_DEB = """#!{python}
import sys, tarfile
with tarfile.open(sys.argv[2]) as package:
    package.extractall(sys.argv[3])
"""


def made_up_pairs(rng, count):
    """Sentences of 5 to 9 made-up words, and the same with each word spelled backwards."""
    syllables = ["ba", "ke", "mo", "ti", "lu", "sa", "ne", "do"]
    vocabulary = ["".join(word) for word in itertools.product(syllables, repeat=3)]
    rows = [rng.choice(vocabulary, size=rng.integers(5, 10)) for _ in range(count)]
    return [(" ".join(row).capitalize() + ".", " ".join(w[::-1] for w in row).capitalize() + ".") for row in rows]


def write_catalogue(path, messages):
    """A compiled gettext catalogue (.mo): header, two tables of (size, place), the texts."""
    texts = [text.encode() for text in [*messages, *messages.values()]]
    place, table, body = 28 + 8 * len(texts), b"", b""
    for text in texts:
        table += struct.pack("<2I", len(text), place + len(body))
        body += text + b"\0"
    header = struct.pack("<7I", 0x950412DE, 0, len(messages), 28, 28 + 8 * len(messages), 0, 28)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header + table + body)


def write_page(path, paragraphs):
    path.parent.mkdir(parents=True, exist_ok=True)
    body = "\n".join(f'<p id="{name}" class="paragraph" dir="auto">{text}</p>' for name, text in paragraphs.items())
    path.write_text(f"<html><body>{body}</body></html>", encoding="utf-8")


@pytest.fixture
def pairs(rng):
    return made_up_pairs(rng, 600)


@pytest.fixture
def store(tmp_path, monkeypatch, pairs):
    """A folder of made-up packages (tar archives); on the PATH is an apt-get that copies them, and a dpkg-deb."""
    (store := tmp_path / "store").mkdir()
    (programs := tmp_path / "programs").mkdir()
    for name, text in (("apt-get", APT_GET), ("dpkg-deb", DPKG_DEB)):
        (programs / name).write_text(text.format(python=sys.executable, store=store))
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.chdir(tmp_path)
    for side, (language, code) in enumerate((("en-us", "en-US"), ("es", "es"))):
        package = tmp_path / f"libreoffice-help-{language}"
        texts = {f"par_id{place}": pair[side] for place, pair in enumerate(pairs)}
        write_page(package / f"usr/share/libreoffice/help/{code}/text/shared/main.html", texts)
        (licence := package / f"usr/share/doc/{package.name}/copyright").parent.mkdir(parents=True)
        licence.write_text("Format: 1.0\n\nFiles: *\nCopyright: A. Contributor\nLicense: MPL-2.0\n\nFiles: icons/*\n")
        pack(package, store)
    package = tmp_path / "libreoffice-l10n-es"
    labels = {"": "Language: es", "menu\4_Save File": "_Guardar archivo"}
    write_catalogue(package / "usr/lib/libreoffice/program/resource/es/LC_MESSAGES/sw.mo", labels)
    pack(package, store)
    return store


def pack(package, store):
    with tarfile.open(store / f"{package.name}_4%3a7.4_all.deb", "w") as archive:
        archive.add(package / "usr", "usr")


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [str(PROGRAM), *arguments])
    example.main()


def read(folder):
    return {name: [line.split("\t") for line in (folder / name).read_text("utf-8").splitlines()] for name in FILES}


def test_help_is_paired_by_page_and_id(tmp_path):
    switch = (
        '<span id="s" class="switchinline"><span id="MAC1" class="MAC">{}</span><span id="default1">{}</span></span>'
    )
    english = {
        "par_id1": 'Click <span class="emph">Save &amp; Close</span>.',
        "par_id2": "Only here",
        "hd_id3": "  Two\n spaces",
        "par_id4": f"Press {switch.format('<b>Option</b>', 'Alt')} now",
        "bm_id5": "No paragraph",
    }
    spanish = {
        "hd_id3": "Dos <br>espacios",
        "par_id1": "Pulse <i>Guardar y cerrar</i>.",
        "par_id4": f"Pulse {switch.format('Opción', '<b>Alt</b>')} ya",
        "par_id6": "Solo aquí",
        "bm_id5": "No es párrafo",
    }
    for code, texts in (("en-US", english), ("es", spanish)):
        write_page(tmp_path / code / "text/swriter/a.html", texts)
        write_page(tmp_path / code / "text/swriter/again.html", {"par_id1": texts["par_id1"]})  # shown once more
    write_page(tmp_path / "en-US/text/scalc/a.html", {"par_id9": "No such page in Spanish"})
    assert example.help_pairs(tmp_path) == [
        ("Click Save & Close.", "Pulse Guardar y cerrar."),
        ("Two spaces", "Dos espacios"),
        ("Press Alt now", "Pulse Alt ya"),
    ]


def test_interface_is_read_from_catalogues(tmp_path):
    messages = {
        "": "Content-Type: text/plain; charset=UTF-8\n",
        "_Copy": "_Copiar",
        "menu|x\4Pa~ste": "P~egar",
        "box\4%d row\0%d rows": "%d fila\0%d filas",
        "Say “hi”": "Diga «hola»",
        "_Use my_name": "_Use my_name",
    }
    write_catalogue(tmp_path / "es/LC_MESSAGES/a.mo", messages)
    write_catalogue(tmp_path / "es/LC_MESSAGES/b.mo", {"_File": "文件(_F)"})
    assert list(example.interface_pairs(tmp_path))[1:] == [
        ("Copy", "Copiar"),
        ("Paste", "Pegar"),
        ("%d row", "%d fila"),
        ('Say "hi"', 'Diga "hola"'),
        ("Use my_name", "Use my_name"),  # for the rule against code to find
        ("File", "文件"),
    ]


@pytest.mark.parametrize(
    "odd, plain",
    [
        ("cafe\u0301", "café"),
        ("« oui » “yes” „ja“", '"oui" "yes" "ja"'),
        ("it’s ‘so’", "it's 'so'"),
        ("a – b\u00a0\t c\n", "a - b c"),
        ("co\u00adop\u200b", "coop"),
    ],
)
def test_plain(odd, plain):
    assert example.plain(odd) == plain


@pytest.mark.parametrize(
    "sentences",
    [
        ["Open it.", "Close it!", "Is it closed?", "¿Y ahora?"],
        ["Use a list, e.g. The first one."],
        ["See step 3. Then go on."],
        ["Press Esc. again."],
        ["Click (twice).", "Wait.", 'Say "yes."', 'Say "no".', "(So it is.)", "Good."],
        ["Ändern Sie es.", "Übernehmen Sie es."],
    ],
)
def test_sentences_are_cut(sentences):
    assert example.SENTENCE_END.split(" ".join(sentences)) == sentences


def test_chinese_and_hindi_sentences_are_cut_and_their_words_counted():
    assert example.SENTENCE_END.split("打开文件。关闭文件。") == ["打开文件。", "关闭文件。"]
    assert example.SENTENCE_END.split("यह है। वह है।") == ["यह है।", "वह है।"]
    assert len(example.words("打开 PDF 文件。")) == 5
    assert example.words("हिन्दी में, लिखें।") == ["हिन्दी", "में", "लिखें"]


@pytest.mark.parametrize(
    "rule, source, target",
    [
        (None, "Opens the selected file.", "Abre el archivo seleccionado."),
        (None, "Row 12 of 3 sheets", "Fila 12 de 3 hojas"),
        (None, '(See "Options" first.)', '(Vea antes "Opciones".)'),
        (None, "Is PDF allowed?", "¿Se permite PDF?"),
        (None, "Row 12 is there", "पंक्ति १२ वहाँ है"),
        ("too short or long", "Open", "Abrir archivo"),
        ("too short or long", "one two three four five six", "uno dos tres"),
        ("unlike lengths", "Go on", "Siga usted adelante sin esperar más"),
        ("unlike digits", "Row 12 of 3", "Fila 12 de 4"),
        ("unlike digits", "All the rows", "Todas las 3 filas"),
        ("code or placeholders", "Delete $1 rows", "Eliminar $1 filas"),
        ("code or placeholders", "Delete %d rows", "Eliminar %d filas"),
        ("code or placeholders", "Returns SUM(A1) here", "Da SUMA(A1) aquí"),
        ("code or placeholders", "Sum = a b", "Suma = a b"),
        ("code or placeholders", "Open the file...", "Abrir el archivo..."),
        ("code or placeholders", "Start soffice.exe now", "Inicie soffice.exe ya"),
        ("code or placeholders", "Set my_name here", "Ponga aquí nombre"),
        ("words in capitals", "Use MIN and MAX", "Utilice MIN y MAX"),
        ("no beginning", ", and so on", "y así sucesivamente"),
        ("no end", 'the "best of all', "lo mejor de todo"),
        ("no end", "the best (of all", "lo mejor (de todo"),
        ("not translated", "Microsoft Word Document", "Microsoft Word Documento"),
        ("not translated", "Microsoft Word", "Microsoft Word documento nuevo"),
        ("not translated", "Same words here", "same words here."),
        ("not translated", "12 34", "12 34"),
    ],
)
def test_rules(rule, source, target):
    limit = 5 if source.startswith("one two") else 14
    assert example.broken_rule((source, target), limit) == rule


def test_sentences_of_texts_that_are_cut_differently_are_left_out(pairs):
    texts = [
        *pairs,
        ("Take all this. Then go on.", "Tome todo esto y siga adelante."),
        ("Go on. Stop it.", "Siga. Pare."),
    ]
    files = example.build(texts, 14)
    assert "Take all" not in "".join(files.values())
    assert "Siga" not in "".join(files.values())  # cut alike, into sentences of one word


def test_one_target_a_source_and_one_source_a_target():
    pairs = [
        ("Save file", "Guardar como"),
        ("Save file", "Guardar archivo"),
        ("Save file", "Guardar archivo"),
        ("SAVE: file!", "Salvar archivo"),  # a source that is there
        ("Store file", "guardar archivo."),  # a target that is there
        ("Save as", "Guardar como"),  # free, since the pair that had this target was not kept
        ("Row 1", "Fila 1"),
        ("Row 2", "Fila 2"),
    ]
    assert example.one_to_one(pairs) == [
        ("Save file", "Guardar archivo"),
        ("Save as", "Guardar como"),
        ("Row 1", "Fila 1"),
    ]


def bigrams(text):
    words = ["", *example.folded(text).split(), ""]
    return set(zip(words, words[1:]))


def jaccard(one, other):
    return len(one & other) / len(one | other)


def test_near_duplicates_are_those_of_all_comparisons(rng):
    texts = [" ".join(rng.choice(list("abcde"), size=rng.integers(2, 8))) for _ in range(150)]
    grams = [bigrams(text) for text in texts]
    expected = [
        any(jaccard(own, other) >= 0.6 for place, other in enumerate(grams) if place != mine)
        for mine, own in enumerate(grams)
    ]
    assert list(example.near_duplicates(texts)) == expected
    assert 20 < sum(expected) < 130


def test_parts_are_disjoint_whole_and_without_near_duplicates(pairs, rng):
    variants = [
        (f"{source[:-1]} again.", f"{target[:-1]} niaga {place}.") for place, (source, target) in enumerate(pairs[:200])
    ]
    fragments = [(source[:-1] + " part", target[:-1] + " trap") for source, target in pairs[200:400]]
    short = [(f"{a.rsplit(' ', len(a.split()) - 3)[0]}.", f"{b[:-1]} trohs.") for a, b in made_up_pairs(rng, 100)]
    everything = [*pairs[:200], *variants, *fragments, *short, *pairs[400:]]
    parts = example.split(everything)
    assert sorted(pair for rows in parts.values() for pair in rows) == sorted(everything)
    held_out = parts["valid.tsv"] + parts["test.tsv"]
    assert min(len(parts["valid.tsv"]), len(parts["test.tsv"])) >= 5
    for place, pair in enumerate(held_out):
        assert len(example.words(pair[0])) >= 4 and pair[0][-1] in ".?!"
        for side in (0, 1):
            others = parts["train.tsv"] + held_out[:place] + held_out[place + 1 :]
            assert all(jaccard(bigrams(pair[side]), bigrams(other[side])) < 0.6 for other in others)


def test_a_sentence_lands_in_the_same_part_whatever_is_beside_it(pairs, rng):
    parts = example.split(pairs)
    assert example.split([pairs[place] for place in rng.permutation(len(pairs))]) == parts
    fewer = example.split(pairs[::2])
    assert all(set(rows) <= set(parts[name]) for name, rows in fewer.items())
    assert parts["train.tsv"] != [pair for pair in pairs if pair in parts["train.tsv"]]  # mixed


def test_the_program_writes_the_files_and_downloads_once(store, monkeypatch, capsys, pairs):
    run(monkeypatch)
    folder = pathlib.Path("runs/libreoffice_es")
    parts = read(folder)
    sources = [source for rows in parts.values() for source, _ in rows]
    assert sorted(sources) == sorted([source for source, _ in pairs] + ["Save File"])
    assert all(
        target == dict(pairs).get(source, "Guardar archivo") for rows in parts.values() for source, target in rows
    )
    notice = (folder / "NOTICE").read_text("utf-8")
    for part in ("libreoffice-help-es_4%3a7.4", "libreoffice-l10n-es_4%3a7.4", "A. Contributor", "mozilla.org/MPL/2.0"):
        assert part in notice
    assert "icons" not in notice and "cut into sentences and filtered" in notice
    output = capsys.readouterr().out
    assert f"train.tsv: {len(parts['train.tsv'])} pairs" in output and parts["test.tsv"][0][1] in output

    before = {name: (folder / name).read_bytes() for name in FILES}
    run(monkeypatch, "--max-words", "7")
    assert (store / "calls").read_text() == "called\n"
    assert max(len(example.words(text)) for rows in read(folder).values() for row in rows for text in row) == 7
    environment = {**os.environ, "PYTHONHASHSEED": "5"}
    done = subprocess.run([sys.executable, str(PROGRAM), "--folder", "again"], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert {name: pathlib.Path("again", name).read_bytes() for name in FILES} == before
    assert sorted(path.name for path in pathlib.Path("again").iterdir()) == sorted([*FILES, "NOTICE", "packages-es"])


def test_a_failed_write_leaves_the_old_files_whole(store, monkeypatch):
    run(monkeypatch)
    folder = pathlib.Path("runs/libreoffice_es")
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    write_text = pathlib.Path.write_text

    def full(path, *arguments, **options):
        if path.name == "test.tsv":
            raise OSError("No space left on device")
        return write_text(path, *arguments, **options)

    monkeypatch.setattr(pathlib.Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        run(monkeypatch, "--max-words", "7")
    assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_without_apt_it_says_what_it_is_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="for Debian, Ubuntu and their kin: it needs apt-get and dpkg-deb"):
        run(monkeypatch)


def test_a_failing_apt_is_quoted_and_a_half_download_not_kept(store, monkeypatch):
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, "--language", "xx")
    for part in ("Unable to locate package libreoffice-help-xx", "apt-cache search libreoffice-help", "apt-get update"):
        assert part in stop.value.code
    assert not list(pathlib.Path("runs/libreoffice_xx").iterdir())  # the English package was there already


def test_a_damaged_package_is_named(store, monkeypatch):
    run(monkeypatch)
    (damaged,) = pathlib.Path("runs/libreoffice_es/packages-es").glob("libreoffice-help-es_*")
    damaged.write_bytes(b"half")
    with pytest.raises(SystemExit, match=f"{damaged.name} cannot be unpacked; remove .*packages-es and run again"):
        run(monkeypatch)


def test_too_few_pairs_are_refused(store, monkeypatch):
    with pytest.raises(SystemExit, match="Too few pairs are left to fill three files: 1."):
        run(monkeypatch, "--max-words", "4")


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("apt-get"), reason="needs Debian, Ubuntu or their kin")
def test_for_real(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        run(monkeypatch)
    except SystemExit as stop:
        if "apt-get update" in str(stop.code):
            pytest.skip(f"cannot download: {stop.code}")
        raise
    parts = read(pathlib.Path("runs/libreoffice_es"))
    assert len(parts["train.tsv"]) > 20000 and min(map(len, parts.values())) > 400
    rows = [tuple(row) for rows in parts.values() for row in rows]
    assert all(2 <= len(example.words(text)) <= 14 for row in rows for text in row)
    for side in (0, 1):
        assert len({example.folded(row[side]) for row in rows}) == len(rows)
    assert ("Text functions", "Funciones de texto") in rows
