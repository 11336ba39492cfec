// Light or dark: what the system asks for, unless the button was used. A plain script in the head, so that no page
// flashes in the wrong colours; the only thing kept in localStorage is this choice.

(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");

  const read = () => {
    try { return localStorage.getItem("paclm-theme"); } catch { return null; }
  };
  const keep = (theme) => {
    try { localStorage.setItem("paclm-theme", theme); } catch { /* a browser without storage still gets its colours */ }
  };
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const announce = () => {
    document.getElementById("theme")?.setAttribute("aria-pressed", String(isDark()));
    document.dispatchEvent(new CustomEvent("themechange"));
  };

  if (["light", "dark"].includes(read())) root.dataset.theme = read();
  system.addEventListener("change", announce);
  document.addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme").addEventListener("click", () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      keep(root.dataset.theme);
      announce();
    });
    announce();
  });
})();
