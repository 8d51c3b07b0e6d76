// What the theme leaves out for readers without a mouse or a screen: tables and charts that scroll take the keyboard, a corner of
// a table is no heading, and buttons that copy are no parts of the page to go to.
const mend = () => {
  for (const each of document.querySelectorAll('.md-typeset__scrollwrap, pre > code, p:has(> img[src$=".svg"])')) each.tabIndex = 0;
  for (const each of document.querySelectorAll("th:empty")) each.outerHTML = "<td></td>";
  for (const each of document.querySelectorAll(".md-code__nav")) each.role = "presentation";
};
mend();
new MutationObserver(mend).observe(document.body, { childList: true, subtree: true });
// On a narrow screen an option stays whole, and other names in code break after the marks in them.
for (const each of document.querySelectorAll(".md-typeset :not(pre) > code")) {
  const parts = each.innerHTML.split(/(\s+)/);
  each.innerHTML = parts.map((part) => part.startsWith("-")
    ? `<span class="option">${part}</span>` : part.length < 14 ? part : part.replace(/[._/=,|](?=[\w&])/g, "$&<wbr>")).join("");
}
// Figures stay on one line; in tables of many columns names do too. Long texts have room beside many columns, or where
// a table scrolls anyway.
const tables = [...document.querySelectorAll(".md-typeset table:not([class])")];
const scrolled = tables.map((table) => Math.max(table.scrollWidth, table.offsetWidth) > document.querySelector("article").clientWidth);
tables.forEach((table, n) => {
  const columns = table.rows[0].cells.length, many = columns > 7;
  for (const cell of table.querySelectorAll("tbody td")) {
    const long = cell.textContent.length >= 40;
    if (many ? !long : /^[-\d.,]+(e[-+]?\d+)?$/.test(cell.textContent)) cell.style.whiteSpace = "nowrap";
    else if (many || long && (columns > 4 || scrolled[n])) cell.style.minWidth = many ? "16rem" : "9rem";
  }
});
// A table of many columns begins with the six that most readers look for. A box shows the others, words choose rows, and a heading sorts.
for (const table of tables.filter((table) => table.rows[0].cells.length > 12)) {
  table.dataset.columns = "few";
  const tools = document.createElement("p"), rows = [...table.tBodies[0].rows];
  tools.className = "tools";
  tools.innerHTML = '<label>Rows with <input type="search" placeholder="llama gb200"></label> <label><input type="checkbox"> all columns</label> <output></output>';
  (table.closest(".md-typeset__scrollwrap") ?? table).before(tools);
  const [words, all] = tools.querySelectorAll("input"), count = tools.querySelector("output");
  const choose = () => {
    const asked = words.value.toLowerCase().split(/\s+/);
    for (const row of rows) row.hidden = !asked.every((word) => row.textContent.toLowerCase().includes(word));
    count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
  };
  words.addEventListener("input", choose);
  all.addEventListener("change", () => { table.dataset.columns = all.checked ? "all" : "few"; });
  [...table.tHead.rows[0].cells].forEach((heading, n) => {
    const button = document.createElement("button"), figure = (row) => parseFloat(row.cells[n].textContent.replaceAll(",", ""));
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const down = heading.ariaSort === "ascending", figures = rows.some((row) => !isNaN(figure(row)));
      for (const other of table.tHead.rows[0].cells) other.ariaSort = null;
      heading.ariaSort = down ? "descending" : "ascending";
      const sorted = rows.toSorted((a, b) => figures ? (figure(a) || 0) - (figure(b) || 0) : a.cells[n].textContent.localeCompare(b.cells[n].textContent));
      table.tBodies[0].append(...(down ? sorted.reverse() : sorted));
    });
  });
  choose();
}
