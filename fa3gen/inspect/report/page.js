"use strict";
(() => {
  const svg = (name) => document.createElementNS("http://www.w3.org/2000/svg", name);

  // Sections fold one by one, all at once, and open when a link leads into them.
  document.querySelectorAll("[data-fold]").forEach((button) => button.addEventListener("click", () => {
    document.querySelectorAll("details.section").forEach((section) => { section.open = button.dataset.fold === "open"; });
  }));
  const unfold = () => {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const section = target && target.closest("details.section");
    if (section && !section.open) { section.open = true; target.scrollIntoView(); }
  };
  addEventListener("hashchange", unfold);
  unfold();

  // Fragments: who owns the element under the pointer, or under the cursor that the arrow keys move.
  document.querySelectorAll("svg[data-fragment]").forEach((picture) => {
    const f = JSON.parse(picture.dataset.fragment);
    const scroller = picture.closest(".scroll");
    const said = document.querySelector(`output[for="${scroller.id}"]`);
    const cursor = picture.querySelector(".cursor"), hits = picture.querySelector(".hits");
    let row = 0, column = 0;
    const at = (r, c) => {
      const [thread, register, part] = f.places[r][c % f.block];
      return { thread, register: register + f.step * Math.floor(c / f.block), part };
    };
    const place = (rect, r, c, width) => {
      rect.setAttribute("x", f.left + c * f.column);
      rect.setAttribute("y", f.top + r * f.row);
      rect.setAttribute("width", width * f.column);
      rect.setAttribute("height", f.row);
    };
    const show = () => {
      const owner = at(row, column);
      const half = owner.part ? ", upper half" : ", lower half";
      const part = owner.part < 0 ? "" : f.each === 4 ? `, byte ${owner.part}` : half;
      said.textContent = `Row ${row}, column ${column}: thread ${owner.thread} (warp ${owner.thread >> 5}, lane ` +
        `${owner.thread & 31}), register ${owner.register}${part}. Outlined: all that this thread holds.`;
      place(cursor, row, column, 1);
      hits.replaceChildren();
      for (let r = 0; r < 64; r += 1) {
        for (let c = 0; c < f.columns; c += 2) {
          if (at(r, c).thread === owner.thread) {
            const hit = svg("rect");
            place(hit, r, c, 2);
            hits.append(hit);
          }
        }
      }
    };
    picture.addEventListener("pointermove", (event) => {
      const box = picture.getBoundingClientRect();
      const scale = picture.viewBox.baseVal.width / box.width;
      const c = Math.floor(((event.clientX - box.left) * scale - f.left) / f.column);
      const r = Math.floor(((event.clientY - box.top) * scale - f.top) / f.row);
      if (r < 0 || r >= 64 || c < 0 || c >= f.columns || (r === row && c === column && hits.firstChild)) { return; }
      row = r;
      column = c;
      show();
    });
    picture.addEventListener("focus", () => { if (!hits.firstChild) { show(); } });
    picture.addEventListener("keydown", (event) => {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (!step) { return; }
      event.preventDefault();
      row = Math.min(63, Math.max(0, row + step[0]));
      column = Math.min(f.columns - 1, Math.max(0, column + step[1]));
      show();
      const x = f.left + column * f.column, y = f.top + row * f.row;
      scroller.scrollLeft = Math.min(x - 40, Math.max(scroller.scrollLeft, x + 60 - scroller.clientWidth));
      scroller.scrollTop = Math.min(y - 30, Math.max(scroller.scrollTop, y + 40 - scroller.clientHeight));
    });
  });

  // The listing: a line opens to what it became; arrow keys go from line to line.
  const listing = document.querySelector(".listing");
  const code = JSON.parse(document.getElementById("code").textContent);
  const rows = [...listing.querySelectorAll(".row.has")];
  if (rows.length) {  // begin below the module's docstring
    rows[0].tabIndex = 0;
    listing.scrollTop = Math.max(0, rows[0].offsetTop - listing.offsetTop - 120);
  }
  const block = (title, lines) => {
    const part = document.createElement("div"), head = document.createElement("h4"), text = document.createElement("pre");
    head.textContent = title;
    text.textContent = lines.join("\n");
    text.tabIndex = 0;
    part.append(head, text);
    return part;
  };
  const toggle = (line) => {
    const open = line.getAttribute("aria-expanded") === "true";
    line.setAttribute("aria-expanded", String(!open));
    if (open) { line.nextElementSibling.remove(); return; }
    const facts = code[line.id.slice(1)], made = document.createElement("div");
    made.className = "made-of";
    if (facts.sass.length) {
      made.append(block(`SASS, ${facts.sass.length} (address, live registers)`,
        facts.sass.map(([address, text, live]) => `${address} ${String(live).padStart(4)}  ${text}`)));
    }
    if (facts.ptx.length) { made.append(block(`PTX, ${facts.ptx.length}`, facts.ptx)); }
    made.style.setProperty("--visible", `${listing.clientWidth}px`);
    line.after(made);
  };
  const go = (line) => {
    rows.forEach((other) => { other.tabIndex = -1; });
    line.tabIndex = 0;
    line.focus();
  };
  listing.addEventListener("click", (event) => {
    const line = event.target.closest(".row.has");
    if (line) { toggle(line); go(line); }
  });
  listing.addEventListener("keydown", (event) => {
    const line = event.target.closest(".row.has");
    if (!line) { return; }
    const next = rows[rows.indexOf(line) + ({ ArrowDown: 1, ArrowUp: -1 }[event.key] || 0)];
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); toggle(line); }
    else if (next && next !== line) { event.preventDefault(); go(next); }
  });

  // The section that is read is marked in the table of contents.
  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
  const seen = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (!entry.isIntersecting) { return; }
    links.forEach((link) => link.classList.remove("here"));
    links.get(entry.target.id)?.classList.add("here");
  }), { rootMargin: "-10% 0px -80% 0px" });
  document.querySelectorAll("details.section").forEach((section) => seen.observe(section));
})();
