// Plays the stages of a collective, see make_film() in jobs/runs/collectives/picture.py.
const SVG = "http://www.w3.org/2000/svg";
const [BOX, HEIGHT, ROW, LABEL, GAP, TOP] = [46, 30, 42, 64, 40, 26];
const TRACK = 420;
const MOVE_MS = 700;
const REST_MS = 500;
const KEYS = { ArrowLeft: "back", ArrowRight: "on", Home: "first", End: "last", " ": "play" };

function shape(name, properties = {}, ...children) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(properties)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function box(x, y, held, title = "") {
  if (held === null) return shape("rect", { class: "nothing", x: x + 1, y: y + 1, width: 42, height: 28, rx: 4 });
  const [text, whose] = held;
  const node = shape("g", { class: `from-${whose}`, transform: `translate(${x} ${y})` });
  if (title) node.append(shape("title", {}, title));
  node.append(shape("rect", { width: 44, height: HEIGHT, rx: 4 }), shape("text", { x: 22, y: 20 }, text));
  return node;
}

/** Draw stage `place`. `share`: progress of the moving elements, 0 to 1. */
function elements(film) {
  const longest = (rows) => Math.max(1, ...rows.map((row) => row.length));
  const all = [film.start, ...film.stages.map((stage) => stage.rows)];
  const nowX = LABEL + (film.given ? longest(film.given) * BOX + GAP : 0);
  const width = nowX + Math.max(...all.map(longest)) * BOX + 2;
  const height = TOP + film.ranks.length * ROW;
  const y = (place) => TOP + place * ROW;
  const rowsAt = (place) => (place === 0 ? film.start : film.stages[place - 1].rows);
  return {
    width,
    height,
    draw(svg, place, share) {
      const parts = [shape("text", { class: "head", x: nowX, y: 14 }, film.given ? "output" : "buffer")];
      if (film.given) parts.push(shape("text", { class: "head", x: LABEL, y: 14 }, "input"));
      const moving = share < 1 && place > 0 ? film.stages[place - 1] : null;
      const rows = rowsAt(moving ? place - 1 : place);
      for (const [index, rank] of film.ranks.entries()) {
        parts.push(shape("text", { class: "rank", x: 0, y: y(index) + 20 }, `rank ${rank}`));
        for (const [i, held] of (film.given?.[index] ?? []).entries()) parts.push(box(LABEL + i * BOX, y(index), held));
        for (const [i, held] of rows[index].entries()) parts.push(box(nowX + i * BOX, y(index), held, held ? `element ${i} on rank ${rank}: ${held[0]}` : ""));
      }
      for (const [source, target, from, to] of moving?.moves ?? []) {
        const held = moving.given ? film.given[source][from] : rows[source][from];
        const fromX = (moving.given ? LABEL : nowX) + from * BOX;
        const bend = source === target && !moving.given ? 0 : Math.sin(Math.PI * share) * 10;
        const x = fromX + (nowX + to * BOX - fromX) * share + bend;
        const flying = box(x, y(source) + (y(target) - y(source)) * share, held);
        flying.classList.add("flying");
        parts.push(flying);
      }
      svg.replaceChildren(...parts);
    },
  };
}

/** Draw the time of each rank in a barrier, up to the time of the stage. */
function moments(film) {
  const end = Math.max(...film.spans.map(([, left]) => left)) || 1;
  const x = (at) => LABEL + (at / end) * TRACK;
  const at = (place) => (place === 0 ? 0 : film.stages[place - 1].at);
  return {
    width: LABEL + TRACK + 16,
    height: film.ranks.length * ROW,
    draw(svg, place, share) {
      const now = at(Math.max(0, place - 1)) + (at(place) - at(Math.max(0, place - 1))) * share;
      const parts = [];
      for (const [index, rank] of film.ranks.entries()) {
        const [came, left] = film.spans[index];
        parts.push(shape("text", { class: "rank", x: 0, y: index * ROW + 20 }, `rank ${rank}`));
        const begun = now >= came && place > 0;
        const wide = begun ? Math.max(1, x(Math.min(left, now)) - x(came)) : 0;
        const bar = shape("rect", { x: x(came), y: index * ROW, width: wide, height: HEIGHT, rx: 4 });
        parts.push(shape("g", { class: `from-${index % 16}` }, bar));
      }
      parts.push(shape("path", { class: "arrow", d: `M${x(now)} 0V${film.ranks.length * ROW}` }));
      svg.replaceChildren(...parts);
    },
  };
}

export function playFilm(root, film) {
  const part = (name) => root.querySelector(`[data-film=${name}]`);
  const picture = film.kind === "barrier" ? moments(film) : elements(film);
  const { width, height } = picture;
  const svg = shape("svg", { class: "boxes", width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  svg.setAttribute("aria-label", "Tensors of each rank at this stage");
  part("frame").append(svg);
  const last = film.stages.length;
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  let place = 0;
  let playing = false;
  let frame = null;
  let timer = null;
  part("place").max = last;

  function show() {
    picture.draw(svg, place, 1);
    showStage();
  }

  function showStage() {
    part("words").textContent = place === 0 ? "Before the first stage." : `Stage ${place} of ${last}. ${film.stages[place - 1].words}`;
    part("place").value = place;
    part("place").setAttribute("aria-valuetext", part("words").textContent);
    part("back").disabled = part("first").disabled = place === 0;
    part("on").disabled = place === last;
    part("play").textContent = playing ? "Pause" : place === last ? "Play again" : "Play";
  }

  function halt() {
    playing = false;
    cancelAnimationFrame(frame);
    clearTimeout(timer);
    frame = null;
  }

  /** Go to the next stage, animated unless the user prefers reduced motion. Then call `after`. */
  function advance(after) {
    place += 1;
    showStage();
    if (still.matches) {
      picture.draw(svg, place, 1);
      timer = setTimeout(after, MOVE_MS + REST_MS);
      return;
    }
    const began = performance.now();
    const step = (now) => {
      const share = Math.min(1, (now - began) / MOVE_MS);
      picture.draw(svg, place, share < 1 ? share * share * (3 - 2 * share) : 1);
      if (share < 1) frame = requestAnimationFrame(step);
      else timer = setTimeout(after, REST_MS);
    };
    frame = requestAnimationFrame(step);
  }

  function play() {
    if (place === last) place = 0;
    playing = true;
    const next = () => {
      if (place < last) advance(next);
      else {
        halt();
        show();
      }
    };
    next();
  }

  function go(to) {
    halt();
    place = Math.min(last, Math.max(0, to));
    show();
  }

  const actions = {
    first: () => go(0),
    last: () => go(last),
    back: () => go(place - 1),
    on: () => {
      if (place === last) return;
      halt();
      advance(() => {});
    },
    play: () => {
      if (!playing) return play();
      return go(place);
    },
  };
  for (const name of ["first", "back", "on", "play"]) part(name).addEventListener("click", actions[name]);
  part("place").addEventListener("input", () => go(Number(part("place").value)));
  root.addEventListener("keydown", (event) => {
    const name = KEYS[event.key];
    const onButton = event.key === " " && event.target.closest("button");
    if (!name || onButton || event.target === part("place") || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    actions[name]();
  });
  root.hidden = false;
  show();
}
